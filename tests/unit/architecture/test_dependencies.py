"""What the packages import and what pyproject.toml declares are the same."""

import ast
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
PROVIDERS = importlib.metadata.packages_distributions()
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


def providers_of(name: str) -> set[str]:
    """Return the distributions that an imported name comes from."""
    return {found.lower().replace("_", "-") for found in PROVIDERS.get(name, [name])}


def test_everything_that_is_declared_is_imported() -> None:
    assert DECLARED - HELD_BACK - set[str]().union(*map(providers_of, imported())) == set()


def test_everything_that_is_imported_is_declared() -> None:
    needed = imported() - OPTIONAL
    assert {name for name in needed if providers_of(name).isdisjoint(DECLARED)} == set()
