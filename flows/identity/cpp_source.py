"""Hash C++ source by its tokens, without comments and layout.

Layout counts where the language counts it: a directive is one line, and space between two of its
tokens decides what a macro is. Where two sources may mean the same, but not plainly so, the digests
differ: a needless build is cheaper than a stale one. `#` before a macro's parameter and `__LINE__`
would see layout elsewhere; sources of this repository do not use them.
"""

import hashlib
import re

SUFFIXES = frozenset({".cpp", ".h"})

# The order of alternatives matters: longer operators before shorter ones, raw strings before names.
_TOKEN = re.compile(
    r"""
      (?P<newline> \n )
    | (?P<space> (?: [^\S\n] | \\[^\S\n]*\n | //(?:\\[^\S\n]*\n|[^\n])* | /\*.*?\*/ )+ )
    | (?P<raw> (?:u8|[uUL])? R "(?P<end>[^()\\\s"]{0,16}) \( .*? \)(?P=end)" \w* )
    | (?P<text> (?:u8|[uUL])? (?: "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' ) \w* )
    | (?P<number> \.?\d (?: [eEpP][+-] | '\w | [\w.] )* )
    | (?P<name> [^\W\d]\w* )
    | (?P<sign> <=> | <<= | >>= | \.\.\. | ->\* | :: | \#\# | \+\+ | -- | -> | \.\* | << | >>
        | %: | && | \|\| | [-+*/%&|^=!<>]= | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_SPLICES = re.compile(r"(?:\\[^\S\n]*\n)+")


def digest_of_cpp(source: bytes) -> str:
    """Return 64 hex digits that only a change of the tokens changes."""
    # surrogateescape: any bytes have tokens, and different bytes have different ones.
    words = tokens_of(source.decode(errors="surrogateescape"))
    return hashlib.sha256("\n".join(f"{word!a}" for word in words).encode()).hexdigest()


def tokens_of(source: str) -> list[str]:
    r"""Return the tokens; those of a directive end with "\n" and have " " where space is."""
    tokens: list[str] = []
    is_directive = False
    begins_line, after_space = True, False
    for match in _TOKEN.finditer(source):
        kind, text = match.lastgroup, match[0]
        if kind == "newline":
            if is_directive:
                tokens.append("\n")
            is_directive, begins_line, after_space = False, True, False
        elif kind == "space" and not _SPLICES.fullmatch(text):
            after_space = True
        else:  # a splice without space may join two halves of a name, so it counts
            if begins_line and text in ("#", "%:"):
                is_directive, after_space = True, False
                tokens.append("\n")
            if is_directive and after_space:
                tokens.append(" ")
            tokens.append(text)
            begins_line, after_space = False, False
    return tokens
