"""What every file of the repository keeps to."""

import ast
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("deployments", "flows", "infra", "nanochat_core", "tasks")
OURS = (*PACKAGES, "bench", "docs")
MAX_LINES = 400
MAX_MODULES = 12


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node of a syntax tree and all statements in it, and none of their expressions."""
    yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield from statements_of(child)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# An event loop that meets such a time while it waits, waits on for hours afterwards.
CLOCK = re.compile(r"""setattr\((time, "|\w+\.time, "|"[\w.]*\.?time\.)(monotonic|sleep)""")
# Calls of torch, and options of torchrun's own rendezvous.
UNPICKLING = re.compile(
    r"\b(all_gather|gather|scatter|broadcast|send|recv)_object(_list)?\("
    r"|torch\.load\((?![^)]*weights_only=True)|\"--standalone|rdzv-backend=c10d"
)
GRAB_BAGS = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
# What no file may be -> where, and how it is found.
FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Path], object]]] = {
    "too long": ((*OURS, "tests"), lambda path: path.read_text().count("\n") > MAX_LINES),
    "code of a package itself": (
        PACKAGES,
        lambda path: path.name == "__init__.py" and path.read_text().strip(),
    ),
    "not ASCII": (OURS, lambda path: not path.read_text("utf-8").isascii()),
    "a grab bag": (PACKAGES, lambda path: path.stem in GRAB_BAGS),
    "a test that replaces a clock others wait by": (
        ("tests",),
        lambda path: CLOCK.search(path.read_text()),
    ),
    "unpickling what another rank or a file has": (
        PACKAGES,
        lambda path: UNPICKLING.search(path.read_text()),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_file_is(fault: str) -> None:
    folders, is_so = FAULTS[fault]
    assert [named(path) for path in python_files(*folders) if is_so(path)] == []


def test_pytest_skips_no_directory_with_tests(pytestconfig: pytest.Config) -> None:
    """By itself it skips some, as those named `build` or `dist`."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = [folder.name for folder in (ROOT / "tests").rglob("*") if folder.is_dir()]
    assert [name for pattern in skipped for name in fnmatch.filter(folders, pattern)] == []


def test_no_folder_has_too_many_modules() -> None:
    modules = Counter(path.parent for path in python_files(*PACKAGES) if path.stem != "__init__")
    assert {named(p): count for p, count in modules.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_class_name_exists_twice_in_a_package(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path in python_files(package):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(named(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_files_with_tests_for_a_gpu_are_listed() -> None:
    listed = (ROOT / "tests" / "gpu.txt").read_text().split()
    marked = re.compile(r"^(@|pytestmark = .*|.*marks=)pytest\.mark\.gpu", re.MULTILINE)
    assert listed == [named(p) for p in python_files("tests") if marked.search(p.read_text())]


# Parts of an f-string that format a time, bytes or a score on their own: flows/render/text.py does.
FORMATTED = re.compile(
    r"\{[^{}]*\} (?:s|min|h|days)\b"  # {seconds:.0f} s
    r"|\{[^{}]*/ ?(?:60|3600|86_?400|1e[369]|10 ?\*\* ?9|2 ?\*\* ?[123]0|GIB)\b"
    r"|\} (?:[kMG]i?B)\b"  # {size} MB
    r"|\[\{[^{}]*:[+,.0-9]*g\}, \{"  # [{low:.4g}, {high:.4g}]
)
FORMATTERS = {
    "flows/cli/checks.py": "memory and disk in GiB, as the needs are stated; a constant",
    "flows/plan/estimate.py": "FLOPs a second, no bytes",
    "flows/report/details.py": "a metric whose name says its unit: peak_memory_gb",
    "flows/cli/artifacts/gc.py": "the number of an option, --keep-days",
}


def test_durations_bytes_and_intervals_are_formatted_in_one_place() -> None:
    found = {
        named(path)
        for path in python_files("flows", "deployments")
        if not named(path).startswith("flows/render/") and FORMATTED.search(path.read_text())
    }
    assert found == FORMATTERS.keys()
