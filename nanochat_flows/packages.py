"""Check that the packages of nanochat-flows are imported from where they are installed.

Their names are common ones: a folder `tasks` on PYTHONPATH, or beside a script, would be imported
in place of ours.
"""

import importlib.machinery
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("deployments", "flows", "infra", "nanochat_core", "tasks")
ROOT = Path(__file__).resolve().parents[1]


def check_packages() -> None:
    """Raise ImportError, with a hint in a second line, if a package is missing or not ours."""
    for name in PACKAGES:
        if message := _mistake(name, find_spec(name)):
            raise ImportError(message)


def _mistake(name: str, spec: importlib.machinery.ModuleSpec | None) -> str | None:
    """Return two lines for a package that is missing or not ours, else None."""
    if spec is None:
        return (
            f"the package `{name}` is missing in {ROOT}\n"
            "hint: install nanochat-flows again, into an environment of its own"
        )
    # A folder without __init__.py has no file of its own, only locations.
    found = Path(spec.origin or next(iter(spec.submodule_search_locations or ()))).resolve()
    if found == ROOT / name / "__init__.py":
        return None
    place = found.parent if found.name == "__init__.py" else found
    return (
        f"Python imports {place} in place of the package `{name}` of nanochat-flows\n"
        f"hint: rename it, or take {place.parent} off PYTHONPATH; `python` needs -P there"
    )
