"""What a calculator that reads a model's text must have no value for, by what each tries.

Nothing here is harmful to write down; most of it would be to evaluate.
"""

_HUGE = "9" * 300

HOSTILE = {
    "nothing": ["", " ", "\n", "\t\t", "()", "( )", "''", '""', "+", "-", "*", "%", "//", ",", "."],
    "not an expression": [
        *("12 +", "+ * 2", "1 2", "(1", "1)", ")(", "((1)", "1 + (2", "2 * * 8", "1 / / 2"),
        *("1; 2", "1\n2", "1 # comment", "x = 1", "1 =", "= 1", "1 == 1 == 1", "?", "1 + ?"),
        "1..2",
        *("'abc", "abc'", "'a'.count('b", "'a'.count'b'", "'a' 'b'", "1 'a'", "1.2.3", "e5", "1e"),
        *("1e+", "1e5.5", ".e1", "1 .", "$5 + $5", "5 apples", "12 km / 3 h", "2 x 3", "7 \\ 2"),
    ],
    "not in the grammar": [
        *("2 ** 8", "2**-1", "9**9**9**9", "(-8) ** (1/3)", "pow(9, 9)", "2 ^ 8", "1 << 100"),
        *("1 << 1 << 1 << 60", "7 >> 1", "7 & 3", "7 | 8", "~1", "1 @ 1", "not 1", "1 and 2"),
        *("1 or 2", "1 < 2", "1 == 1", "1 != 1", "1 in (1,)", "1 is 1", "1 if 1 else 2", "True"),
        *("False", "None", "Ellipsis", "...", "1j", "2 + 3j", "0x10", "0b11", "0o17", "1_000"),
        "007",
        *("x", "_", "pi", "e", "inf", "nan", "-inf", "Infinity", "__name__", "1 .real", "1.5.real"),
    ],
    "collections and comprehensions": [
        *("(1, 2)", "1, 2 + 3", "(1,)", "[1]", "[1] * 9", "{1}", "{1: 2}", "{}", "[*'ab']"),
        "[1][0]",
        *("(i for i in (1, 2))", "[i for i in range(10 ** 9)]", "{i: i for i in range(9)}"),
        *("[0] * 10 ** 10", "[[]] * 999999999", "(0,) * 1e9", "bytearray(1 << 40)", "range(10)"),
    ],
    "names and calls": [
        *("__import__('os').system('true')", "open('/etc/passwd').read()", "exec('1')", "print(1)"),
        *("eval('1 + 1')", "compile('1', '', 'eval')", "globals()", "locals()", "vars()", "dir()"),
        *("input()", "exit()", "quit()", "breakpoint()", "help()", "id(1)", "abs(-1)", "max(1, 2)"),
        *("sum([1, 2])", "round(1.5)", "int('9' * 9999)", "float('nan')", "str(1)", "len('abc')"),
        *("chr(65)", "ord('a')", "hash('a')", "type(1)", "iter('a')", "next(iter('a'))", "1(2)"),
        *("getattr(1, 'real')", "setattr(1, 'x', 2)", "memoryview(b'a')", "super()", "object()"),
        *("lambda: 1", "(lambda: 1)()", "(x := 1)", "await x", "yield", "(yield 1)", "*1", "**1"),
    ],
    "attributes": [
        *("().__class__", "().__class__.__bases__[0].__subclasses__()", "''.__class__", "(1).real"),
        *("'a'.count.__self__", "'a'.count.__call__('a')", "'a'.__len__()", "'a'.__class__('b')"),
        *("1 .__add__(1)", "(0).__init__()", "'{0.__class__}'.format(1)", "f'{1}'", "f'{1 + 1}'"),
        *("'a'.format", "'%s' % 1", "'%99999999d' % 1", "'a' % 1", "'a'.mro()", "1 .to_bytes(9)"),
    ],
    "strings that grow": [
        *("'a'", "'abc'", "'a' * 3", "3 * 'a'", "'a' + 'b'", "'a' * 999999999", "999999999 * 'a'"),
        *("'a'.center(50000000).count(' ')", "'a'.center(1000000000)", "'a'.ljust(1000000000)"),
        *("'a'.zfill(1000000000)", "'a'.rjust(9).count(' ')", "'a'.expandtabs(1)"),
        "'a'.join('bc')",
        *("'a'.replace('a', 'aa').count('a')", "'a'.upper().count('A')", "'a'.encode()", "'a'[0]"),
        *("('a' * 9).count('a')", "('a' + 'b').count('a')", "'a'.translate({})", "'a'.split('a')"),
    ],
    "counting otherwise": [
        *("'a'.count", "'a'.count()", "'a'.count('a', 0)", "'a'.count('a', 0, 1)", "'a'.count(1)"),
        *("'a'.count('a'.count('a'))", "'a'.count(*'a')", "'a'.count(**{})", "'a'.count(sub='a')"),
        *("'\\x61'.count('a')", "'\\n'.count('n')", "'a\nb'.count('b')", "f'{1}'.count('1')"),
        *("b'a'.count(b'a')", "r'a'.count('a')", "u'a'.count('a')", "1 .count('1')"),
        "(1).count(1)",
        *("'''a'''.count('a')", "'a'.count('''a''')", "'a'.counts('a')", "'a'.Count('a')", "count"),
        *("'a'.count('a').count('a')", "'a'.count('a')('a')", "'a'.count(('a'))('a')"),
        "count('a')",
        *("'" + "a" * 600 + "'.count('a')", "'" + "a" * 510 + "'"),
        "'a'.count('" + "a" * 500 + "')",
    ],
    "no finite value": [
        *("1 / 0", "1 % 0", "1 // 0", "1 // 0.0", "1 / (2 - 2)", "0 / 0", "1 / -0"),
        "1 / 'a'.count('b')",
        *("1e308 * 10", "1e999", "-1e999", "1e308 + 1e308", "1e999 - 1e999", "1e308 * 1e308 * 0"),
        *("0.0 * 1e999", "1e999 % 2", f"{_HUGE}{_HUGE[:200]} / 2", f"{_HUGE} / 1e-300"),
    ],
    "huge numbers": [
        *("9" * 310, "9" * 512, f"{_HUGE} * {_HUGE[:200]}", f"-{_HUGE} * {_HUGE[:200]}"),
        *("1" + "0" * 400 + " % 7", "9" * 400 + " // " + "9" * 100, "9," * 200 + ",9"),
        *("*".join(["9" * 120] * 4), "*".join(["999999999"] * 40), "+".join(["1e308"] * 9)),
    ],
    "deep and long": [
        *("(" * 400 + "1" + ")" * 100, "(" * 250 + "1" + ")" * 250, "(" * 100 + "1" + ")" * 100),
        *("-" * 511 + "1", "+" * 511 + "1", "- " * 250 + "1", "-(" * 100 + "1" + ")" * 100),
        *("+".join(["1"] * 256), "1" * 513, "1 +" * 100_000, " " * 600 + "1"),
        "1" + " " * 10_000_000,
        *("(" * 511, ")" * 511, "[" * 511, "'" * 511, '"' * 512, "." * 512, "," * 512, "%" * 512),
        *("9" * 10_000_000, "(" * 10_000_000, "'a'.count('a')+" * 30 + "1", "((1)+" * 60 + "1"),
    ],
    "characters": [
        *("\x00", "1\x00", "1 + \x00 2", "\u0661 + \u0661", "\ud800", "1 + \ud800", "\u00b2"),
        "2\u00b2",
        *("\uff11 + \uff11", "1\u00a0+ 1", "1 \u00d7 2", "6 \u00f7 2", "1 \u2212 1", "\u221a4"),
        "\ufeff1",
        *("1\u200b", "1\u202e + 2", "\u2460", "\u4e00 + \u4e00", "1\x0b+ 1", "1\x0c", "1\x1b[0m"),
        "1\\\n+ 1",
        *("`1`", "1!", "3!", "!1", "@1", "1:2", "1 -> 2", "|1|", "{1 + 1}", "<<1+1=2>>", "#### 4"),
    ],
}
