"""Extract the documentation of one Python source file as training documents.

A module becomes one document: its docstring, then each function's signature and docstring. A class
with enough text becomes its own document. The source is parsed, never imported.
"""

import ast
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MIN_ENTRY_CHARS = 40  # a shorter docstring adds nothing to the name
MIN_CLASS_CHARS = 1_500  # a class with less is part of its module's document
MIN_CHARS = 200  # of a document
MAX_CHARS = 12_000  # a longer document is cut between paragraphs
MIN_SHARE = 0.1  # of a file in triple quotes; parsing other files takes long and yields little
MAX_SIGNATURE_CHARS = 400
MAX_FOREIGN_SHARE = 0.1  # of non-ASCII characters; more means tables of symbols, not prose

_Container: TypeAlias = ast.Module | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_BRACKET_SPACE = re.compile(r"([(\[]) |,? ([)\]])")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One docstring under the line that it documents."""

    heading: str  # a signature, or a name; empty for the docstring of the section itself
    text: str


@dataclass(frozen=True, kw_only=True)
class DocSection:
    """The documentation of a module or a class."""

    title: str
    entries: tuple[Entry, ...]

    @property
    def characters(self) -> int:
        """The number of characters of all its docstrings."""
        return sum(len(entry.text) for entry in self.entries)


def read_sections(source: str, module: str) -> list[DocSection]:
    """Return the module's section, then those of its larger classes; none if it does not parse."""
    if sum(map(len, _QUOTED.findall(source))) < MIN_SHARE * len(source):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source's bad escapes are not ours to report
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.splitlines()
    entries = list(_entries(tree, lines))
    classes: list[DocSection] = []
    for node in _classes(tree):
        section = DocSection(
            title=f"{module}: {_signature(node, lines)}", entries=tuple(_entries(node, lines))
        )
        if section.characters >= MIN_CLASS_CHARS:
            classes.append(section)
        # A small class joins its module's document, with its signature as the first heading.
        elif section.entries:
            first, *rest = section.entries
            heading = first.heading or _signature(node, lines)
            entries += [Entry(heading=heading, text=first.text), *rest]
    sections = [DocSection(title=module, entries=tuple(entries)), *classes]
    return [section for section in sections if section.entries]


def make_documents(sections: Sequence[DocSection], *, seen: set[str]) -> list[str]:
    """Return each section as text, long ones in parts, without the docstrings in `seen`.

    Docstrings are often copied, as from a class to its wrapper. This call adds those it uses to
    `seen`, so that the first copy counts.
    """
    documents: list[str] = []
    for section in sections:
        paragraphs: list[str] = []
        for entry in section.entries:
            if entry.text not in seen:
                seen.add(entry.text)
                paragraphs.append(f"{entry.heading}\n\n{entry.text}".strip())
        documents += split_text(paragraphs, title=section.title)
    return documents


def split_text(paragraphs: Sequence[str], *, title: str) -> list[str]:
    """Return documents of at most about MAX_CHARS: the title and consecutive paragraphs.

    A last document shorter than MIN_CHARS is dropped.
    """
    documents: list[str] = []
    part: list[str] = []
    size = 0
    for piece in _pieces(paragraphs):
        if part and size + len(piece) > MAX_CHARS:
            documents.append("\n\n".join([title, *part]))
            part, size = [], 0
        # A single piece may exceed the limit: a line is never split.
        part.append(piece)
        size += len(piece)
    if size >= MIN_CHARS:
        documents.append("\n\n".join([title, *part]))
    return documents


def clean(text: str) -> str:
    """Remove indentation, control characters and runs of blank lines; "" if it is hardly prose."""
    text = _CONTROL.sub("", inspect.cleandoc(text.replace("\r\n", "\n")))
    text = _BLANK_LINES.sub("\n\n", _TRAILING.sub("", text)).strip()
    text = text.encode("utf-8", "replace").decode()  # an escape can name half a surrogate pair
    foreign = 0 if text.isascii() else sum(character > "\x7f" for character in text)
    if len(text) < MIN_ENTRY_CHARS or foreign > MAX_FOREIGN_SHARE * len(text):
        return ""
    return text


def _pieces(paragraphs: Sequence[str]) -> Iterator[str]:
    """Yield the paragraphs; those longer than MAX_CHARS are split at blank lines, else at lines."""
    for paragraph in paragraphs:
        if len(paragraph) <= MAX_CHARS:
            yield paragraph
        else:
            separator = "\n\n" if "\n\n" in paragraph else "\n"
            part = ""
            for line in paragraph.split(separator):
                if part and len(part) + len(line) > MAX_CHARS:
                    yield part
                    part = ""
                part = f"{part}{separator}{line}" if part else line
            yield part


def _members(node: _Container) -> Iterator[ast.stmt]:
    """Yield the statements of the body, and of its `if` and `try` branches."""
    # A stack in reverse, so that statements come out in the order of the source.
    pending: list[ast.stmt] = list(reversed(node.body))
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.If | ast.Try):
            pending += reversed([*statement.body, *statement.orelse])
        else:
            yield statement


def _classes(node: _Container) -> Iterator[ast.ClassDef]:
    for member in _members(node):
        if isinstance(member, ast.ClassDef):
            yield member
            yield from _classes(member)


def _entries(node: _Container, lines: list[str]) -> Iterator[Entry]:
    """Yield the docstring of the container and those of its functions, without its classes."""
    own = clean(ast.get_docstring(node, clean=False) or "")
    if own:
        yield Entry(heading="", text=own)
    for member in _members(node):
        if isinstance(member, _FUNCTIONS):
            text = clean(ast.get_docstring(member, clean=False) or "")
            if text:
                yield Entry(heading=_signature(member, lines), text=text)


def _signature(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str:
    """Return the source from `def` or `class` to the body, on one line."""
    # Comments in a signature are cut off at two spaces and "#", as PEP 8 writes them.
    header = lines[node.lineno - 1 : node.body[0].lineno - 1]
    text = " ".join(line.partition("  #")[0].strip() for line in header).strip()
    if not text or len(text) > MAX_SIGNATURE_CHARS:
        text = ("class " if isinstance(node, ast.ClassDef) else "def ") + node.name
    return _BRACKET_SPACE.sub(r"\1\2", text)
