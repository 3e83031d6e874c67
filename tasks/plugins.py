"""Find and load what installed packages add by entry points.

An object reference is the packaging standard's `module:attribute`.
"""

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tasks.base import TaskError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def references(group: str, name: str) -> list[str]:
    """Return `module:attribute` of each entry point of `group` called `name`, sorted.

    Reads the metadata of every installed package: some 10 ms.
    """
    return sorted({entry.value for entry in _entries(group) if entry.name == name})


def names(group: str) -> set[str]:
    """Return the names of the entry points of `group`."""
    return {entry.name for entry in _entries(group)}


def _entries(group: str) -> "Iterable[EntryPoint]":
    # Imported here: few runs need it, and every command would wait 20 ms for it.
    from importlib.metadata import entry_points

    return entry_points(group=group)


def load(reference: str) -> Any:
    """Import `module:attribute`."""
    # The scan of imports for fingerprints cannot see this one: they add the module by its name.
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_one(found: Sequence[str], kind: type | tuple[type, ...], what: str) -> Any:
    """Load the only one of `found`, for messages called `what`.

    Raises TaskError if there are several, or if it cannot be imported or is not of type `kind`.
    """
    if len(found) > 1:
        raise TaskError(f"installed packages have more than one {what}: {', '.join(found)}")
    (reference,) = found
    try:
        loaded = load(reference)
    except Exception as error:  # a package's own code may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise TaskError(f"{what} cannot be loaded from {reference}: {why}") from error
    if not isinstance(loaded, kind):
        raise TaskError(f"{what}: {reference} is of type {type(loaded).__name__}")
    return loaded
