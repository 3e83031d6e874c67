"""Scan a Python module: a digest of its syntax tree, its imports, the files that it names."""

import ast
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

# Positions, and fields that some Python versions fill and others lack.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
# Names that read docstrings. Not whole literals: this module is scanned too.
_DOCSTRINGS = frozenset((f"__{'doc'}__", f"get{'doc'}"))
_PARSES = 5  # tries; failures are rare and independent


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the closure, scanned. A data file has no imports and names no files."""

    digest: str
    imports: tuple[str, ...] = ()  # dotted names, of modules or of things in them
    file_names: tuple[str, ...] = ()  # string literals that look like a file's name
    reads_docstrings: bool = False


def _parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a module."""
    # CPython 3.11 raises SystemError, a wrong recursion depth, if another thread parses too.
    for _ in range(_PARSES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


@lru_cache(maxsize=1024)  # of a process that plans again and again
def scan(source: bytes, *, package: str) -> Module:
    """Return a module's digest and references; `package` is where relative imports start."""
    tree = _parse(source)
    walk = _Walk(package)
    walk.add(tree)
    return Module(
        digest=hashlib.sha256("\n".join(walk.parts).encode()).hexdigest(),
        imports=tuple(sorted(walk.imports)),
        file_names=tuple(sorted(walk.file_names)),
        reads_docstrings=walk.reads_docstrings,
    )


class _Walk:
    """A syntax tree as a list of words, the same on every Python from 3.11 on (unlike ast.dump)."""

    def __init__(self, package: str) -> None:
        self.parts: list[str] = []
        self.imports: set[str] = set()
        self.file_names: set[str] = set()
        self.reads_docstrings = False
        self._package = package

    def add(self, value: object) -> None:
        """Append `value` (a node, a list of nodes, or a plain value) and everything inside."""
        if isinstance(value, ast.AST):
            self._add_node(value)
        elif isinstance(value, list):
            self.parts.append("[")
            for item in cast("list[object]", value):
                if not _is_idle(item):
                    self.add(item)
            self.parts.append("]")
        else:
            self.parts.append(f"{type(value).__name__} {value!a}")

    def _add_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.update(_imported(node, self._package))
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias | ast.MatchClass):
            names = (getattr(node, field, "") for field in ("id", "attr", "name"))
            found = {*names, *getattr(node, "kwd_attrs", ())}
            self.reads_docstrings |= not found.isdisjoint(_DOCSTRINGS)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.reads_docstrings |= node.value in _DOCSTRINGS  # for getattr
            # Only a candidate: it counts if such a file exists next to the module.
            if _is_file_name(node.value):
                self.file_names.add(node.value)
        elif isinstance(node, ast.JoinedStr):  # some Python versions add empty parts
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        elif isinstance(node, ast.Module) and all(map(_is_idle, node.body)):
            node.body = []  # a package that only has a docstring is as good as an empty one
        self.parts.append(type(node).__name__)
        for name in _fields(type(node)):
            value = getattr(node, name, None)
            if value is not None and value != []:
                self.parts.append(name)
                self.add(value)
        self.parts.append(".")


@lru_cache(maxsize=256)
def _fields(node_type: type[ast.AST]) -> tuple[str, ...]:
    return tuple(sorted(set(node_type._fields) - _IGNORED_FIELDS))


def _is_idle(item: object) -> bool:
    """Return whether a statement does nothing: `pass`, or a string by itself (a docstring)."""
    if isinstance(item, ast.Expr):
        return isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
    return isinstance(item, ast.Pass)


def _is_file_name(text: str) -> bool:
    """Return whether a string may name a data file: short, relative, with a suffix."""
    # Not .py: modules count by imports. Not "..": a file must lie next to the module or below.
    stem, dot, suffix = text.rpartition(".")
    is_name = bool(stem and dot and suffix.isalnum()) and suffix != "py"
    return is_name and len(text) < 100 and not text.startswith("/") and ".." not in text


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        # One dot is the package itself, so level 1 removes nothing.
        above = parts[: len(parts) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    yield from (f"{base}.{alias.name}" for alias in node.names)
