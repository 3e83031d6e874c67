"""What the packages import and what pyproject.toml declares are the same."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib

from tests.unit.architecture.test_files import PACKAGES, ROOT, python_files, statements_of, tree_of

# Declared for their versions alone, with the reason beside them.
HELD_BACK = {"sqlalchemy", "whenever"}
# Imported only where they are installed, callers say what is missing; and a part of pydantic.
OPTIONAL = {
    *("cudnn", "flash_attn", "flash_attn_interface", "kubernetes", "pydantic_core"),
    *("transformers", "triton"),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = {re.split(r"[\[<>=;~ ]", item)[0].lower() for item in PROJECT["dependencies"]}


def imported() -> set[str]:
    """Top-level names that a module of ours imports, less the standard library and ourselves."""
    names: set[str] = set()
    for path in python_files(*PACKAGES):
        for node in statements_of(tree_of(path)):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).partition(".")[0])
    return names - sys.stdlib_module_names - {*PACKAGES, "nanochat_flows"}


@functools.cache
def providers() -> dict[str, set[str]]:
    """Imported name -> the declared distributions that it comes from."""
    provided = {name: _top_level_of(name) for name in DECLARED}
    return {
        name: {item for item, names in provided.items() if name in names} for name in imported()
    }


def _top_level_of(distribution: str) -> set[str]:
    """Return what can be imported of a distribution; its own name if it is not installed."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return {distribution}
    if listed := found.read_text("top_level.txt"):
        return {*listed.split()}
    lines = (found.read_text("RECORD") or "").splitlines()
    return {line.partition("/")[0].partition(".")[0] for line in lines}


def test_everything_that_is_declared_is_imported() -> None:
    assert DECLARED - HELD_BACK - set[str]().union(*providers().values()) == set()


def test_everything_that_is_imported_is_declared() -> None:
    needed = {name: found for name, found in providers().items() if name not in OPTIONAL}
    assert {name for name, found in needed.items() if not found} == set()
