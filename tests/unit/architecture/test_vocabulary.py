"""Docstrings, comments, messages and docs use the words of the field: a reader can search them."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.unit.architecture.test_files import (
    PACKAGES,
    ROOT,
    named,
    python_files,
    statements_of,
    tree_of,
)

# A private word, and the field's word for it.
INSTEAD_OF = {
    r"told|tells?|telling": "report, log, notify, return",
    r"whoever": "caller, owner, client",
    r"nobody|somebody": "no process, another process",
    r"goes on|go on|went on|going on|gone on": "continue, resume",
    r"judge[sd]?|judging|judgement": "evaluate, score, grade",
    r"by hand": "manually, or the command",
    r"made up": "synthetic",
    r"beside": "next to, compared with, in addition to",
    r"anew|put aside": "again, rename",
    r"(?:is|are|was|were) (?:said|away)": "who prints what; is down, does not answer",
    r"(?:it|that|which) is none|is none of|neither (?:it|they) nor": "is not one",
    r"leaves? out 0|to blame|at hand": "excludes 0, caused, available",
}
# The same in names, and words of our own that were replaced; see STANDARD for the exceptions.
PRIVATE_NAMES = re.compile(
    r"(?<![a-z])(told|tells?|telling|whoever|nobody|judge[sd]?|judging"
    r"|fence|courier|pulses?|meeting)(?![a-z])"
)
SUPERLATIVE = re.compile(r"_?(MOST|LEAST)_")  # MAX_, MIN_
STANDARD = {
    "tell": {"infra/launch/torchrun.py", "nanochat_core/data/array_files.py"},  # of a file
    "fence": {"flows/render/text.py"},  # of a code block in markdown
}
PRIVATE = re.compile(rf"\b({'|'.join(INSTEAD_OF)})\b", re.IGNORECASE)
NO_VERB = re.compile(r"(What|Whether|Who|How|Where|When|Which)\b")
MAX_WITHOUT_VERB = 0.02  # of all docstrings
# Where a word is right all the same: file -> (words, reason).
ALLOWED: dict[str, tuple[set[str], str]] = {
    "tasks/generated/spelling.py": ({"tell"}, "questions that a model learns from"),
    "tasks/generated/sums.py": ({"tell"}, "questions that a model learns from"),
    "tasks/generated/spelling_bee.py": ({"by hand"}, "answers that a model learns from"),
}
AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
HISTORY = ("docs/LOG.md", "docs/decisions/", "docs/verification/changes-")  # never rewritten


@functools.cache
def tokens_of(path: Path) -> list[tuple[int, str]]:
    """Type and text of every token of a Python file."""
    lines = io.StringIO(path.read_text(encoding="utf-8")).readline
    return [token[:2] for token in tokenize.generate_tokens(lines)]


def prose_of(path: Path) -> Iterator[str]:
    """Lines of comments and strings of a Python file; all lines of any other."""
    if path.suffix != ".py":
        yield from path.read_text(encoding="utf-8").splitlines()
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for kind, text in tokens_of(path):
        if kind in kinds:
            yield from text.splitlines()


def private_words(path: Path) -> set[str]:
    if not PRIVATE.search(path.read_text(encoding="utf-8")):
        return set()  # to take a file apart takes long
    return {match[0].lower() for line in prose_of(path) for match in PRIVATE.finditer(line)}


def docstrings() -> list[str]:
    trees = [tree_of(path) for path in python_files(*PACKAGES)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for tree in trees for n in statements_of(tree) if isinstance(n, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def private_names(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if not PRIVATE_NAMES.search(text.lower()) and not SUPERLATIVE.search(text):
        return set()
    names = {text for kind, text in tokens_of(path) if kind == tokenize.NAME}
    return {n for n in names if PRIVATE_NAMES.search(n.lower()) or SUPERLATIVE.match(n)}


def test_names_use_the_words_of_the_field() -> None:
    found = {named(path): private_names(path) for path in python_files(*PACKAGES, "bench")}
    for name, files in STANDARD.items():
        for file in files:
            found[file].discard(name)
    assert {file: names for file, names in found.items() if names} == {}


def test_source_and_docs_use_the_words_of_the_field() -> None:
    docs = [p for p in sorted((ROOT / "docs").rglob("*.md")) if not named(p).startswith(HISTORY)]
    found = {
        named(path): words - ALLOWED.get(named(path), (set[str](), ""))[0]
        for path in [*python_files(*PACKAGES), *docs, *(ROOT / name for name in AT_THE_ROOT)]
        if (words := private_words(path))
    }
    assert {name: words for name, words in found.items() if words} == {}


def test_docstrings_begin_with_what_the_function_does() -> None:
    texts = docstrings()
    without = [text.splitlines()[0] for text in texts if NO_VERB.match(text)]
    assert len(without) <= MAX_WITHOUT_VERB * len(texts), without
