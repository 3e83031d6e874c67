"""C++ by its tokens: what is the same program, and what is another one."""

import pytest

from flows.identity.cpp_source import digest_of_cpp, tokens_of
from flows.identity.fingerprint import REPOSITORY


def digest(text: str) -> str:
    return digest_of_cpp(text.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a = 1;", "int  a=1 ;\n"),
        ("int a = 1;", "// why\nint /* what */ a = 1; // so\n"),
        ("int a = 1;", "int a = 1; // so it \\\n goes on = 2;\n"),
        ("int a;\nint b;", "int a; int b;"),
        ("f(a,\n  b);", "f(a, b);"),
        ("int a;\r\n", "int a;\n"),
        ("#define A 1\nint a;", "#define A 1  // one\n\n\nint a;"),
        ("#define A 1 + 2\n", "#define  A 1 \\\n    +  2\n"),
        ("#if A\n#endif\n", "#if A /* or\n not */\n  #endif\n"),
        ("a /**/ b", "a b"),
        ('x = "a"; // "b', 'x = "a";'),
        ("int million = 1'000'000; // it's", "int million = 1'000'000;"),
    ],
)
def test_comments_and_layout_decide_nothing(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a = 1;", "int a = 2;"),
        ("a - -b", "a--b"),
        ("a + ++b", "a++ + b"),
        ("intx;", "int x;"),
        ("1e+3", "1e + 3"),
        ("1'000", "1'001"),
        ('s = "a b";', 's = "a  b";'),
        ('s = "// a";', 's = "// b";'),
        ('s = "/*a*/";', 's = "/*b*/";'),
        (r's = "\"//a";', r's = "\"//b";'),
        ("c = '\"'; // a", "c = '\"'; a"),
        ("c = ' ';", "c = '  ';"),
        ('s = R"(a b)";', 's = R"(a  b)";'),
        ('s = R"(// a)";', 's = R"(// b)";'),
        ('s = R"x()" // a)x";', 's = R"x()" // b)x";'),
        ('s = R"(a\\\nb)";', 's = R"(ab)";'),
        ('s = "a";', 's = u8"a";'),
        ("#define A\nint a;", "#define A int a;"),
        ("#define F(x) x\n", "#define F (x) x\n"),
        ("#define A 1\n+ 2;", "#define A 1 \\\n+ 2;"),
        ("#if A\nint a;\n#endif\n", "#if A\n#endif\nint a;\n"),
        ("// a \\\nint a;", "// a\nint a;"),
        ("fo\\\no", "fo o"),
        ("int a;", "int a; int b;"),
    ],
)
def test_another_program_is_another_digest(one, other):
    assert digest(one) != digest(other)


def test_a_digest_is_pinned():
    """The same on every Python; when it must change, every artifact of the kernels is rebuilt."""
    text = (
        '#define F(x) (x)  // one\nauto s = R"(a)" "b\\n"; /* two */ int a = F(0x1p-3) << 1\'0;\n'
    )
    assert digest(text) == "c4d3f11a6027c6333f0a88889f6f453857c1554f04b7e65ff45cd6931cd4eadf"


def test_our_sources_use_nothing_that_sees_layout():
    """`#` before a parameter makes text of it, with its spaces; `__LINE__` is a line's number."""
    sources = [p for p in REPOSITORY.glob("nanochat_core/**/*") if p.suffix in (".cpp", ".h")]
    assert len(sources) == 14
    for path in sources:
        tokens = [token for token in tokens_of(path.read_text()) if token != " "]
        assert not {"__LINE__", "__COUNTER__"} & set(tokens), path
        pairs = zip(["\n", *tokens], tokens, strict=False)
        assert {before for before, token in pairs if token == "#"} <= {"\n"}, path


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("%:define A 1\nint a;\n", "%:define A\n1 int a;\n"),
        ("%:define F (x)\n", "%:define F(x)\n"),
        ("  %: define A 1\nA\n", "  %: define A\n1 A\n"),
    ],
)
def test_a_directive_may_begin_with_a_digraph(one, other):
    assert digest_of_cpp(one.encode()) != digest_of_cpp(other.encode())
