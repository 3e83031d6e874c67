r"""Regular expressions that split text into the pieces inside which the tokenizer merges bytes.

`nanochat` is GPT-4's, but with digits in groups of at most two: three would spend a thousand tokens
of a small vocabulary on numbers. `gpt4` has groups of three. In both a word is a run of letters
(\p{L}), so the vowel signs of Hindi and Thai or the points of Hebrew, which are marks (\p{M}),
divide a word. In `multilingual` marks belong to words.
"""

_LETTERS, _LETTERS_AND_MARKS = r"\p{L}", r"\p{L}\p{M}"


def _parts(word: str, letters: str, digits: int, *, possessive: bool) -> tuple[str, ...]:
    """Return the alternatives of a pattern that the regex engine can run on its automaton.

    All of them if not `possessive`: a possessive quantifier makes no difference where what follows
    cannot begin with what it consumed.
    """
    plus = "+" if possessive else ""
    return (
        r"'(?i:[sdmt]|ll|ve|re)",
        rf"[^\r\n{letters}\p{{N}}]?{plus}{word}+",
        rf"\p{{N}}{{1,{digits}}}",
        rf" ?[^\s{letters}\p{{N}}]+{plus}[\r\n]*",
        r"\s*[\r\n]",
    )


_WHITE_SPACE = (r"\s+(?!\S)", r"\s+")
_SHAPES = {
    "nanochat": (_LETTERS, _LETTERS, 2),
    "gpt4": (_LETTERS, _LETTERS, 3),
    "multilingual": (f"[{_LETTERS_AND_MARKS}]", _LETTERS_AND_MARKS, 2),
}
# Name -> pattern, as other programs write it.
PATTERNS = {
    name: "|".join((*_parts(*shape, possessive=True), *_WHITE_SPACE))
    for name, shape in _SHAPES.items()
}
SPLIT_PATTERN = PATTERNS["nanochat"]
# The patterns that a tokenizer may have, and those that are run: they match the same pieces, here
# 1.8 times as fast. Others are refused: one that comes with a model may take minutes for a short
# text, and an hour for a long one. The regex engine runs a group on its automaton if it has neither
# lookahead nor possessive quantifiers; here that is all but runs of whitespace.
KNOWN_PATTERNS = {
    PATTERNS[name]: "|".join((f"(?:{'|'.join(_parts(*shape, possessive=False))})", *_WHITE_SPACE))
    for name, shape in _SHAPES.items()
}
