"""Read mixtures of tasks from small TOML files: tasks, rows of each, epochs.

    [[dataset]]
    task = "smoltalk"
    rows = 10_000       # the first so many; default: all
    epochs = 2          # default: 1

Built-in mixtures are next to this file; a user's own is given by its path.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.base import TaskError
from tasks.user_files import FileFault, read_text

# Each by its name, because a fingerprint sees the data files that a module names.
FILES = (
    "evening.toml",
    "midtrain.toml",
    "sft-without-midtraining.toml",
    "sft.toml",
)
_DIRECTORY = Path(__file__).parent
_KEYS = {"task", "rows", "epochs"}


@dataclass(frozen=True, kw_only=True)
class Share:
    """One task's part of a mixture."""

    task: str
    rows: int | None  # the first so many; None means all
    epochs: int


def mixture_names() -> list[str]:
    """Return the names of the built-in mixtures, sorted."""
    return sorted(Path(file).stem for file in FILES)


def read_mixture(name: str) -> tuple[Share, ...]:
    """Read the mixture called `name`, or the file at that path. Raises TaskError naming it.

    Raises FileFault for one that is not text.
    """
    path = Path(name) if name.endswith(".toml") or "/" in name else _DIRECTORY / f"{name}.toml"
    try:
        tree = tomllib.loads(read_text(path))
    except FileNotFoundError:
        known = ", ".join(mixture_names())
        raise TaskError(f"there is no mixture '{name}' (one of: {known}, or a .toml)") from None
    except FileFault:
        raise
    except (OSError, ValueError, RecursionError) as error:  # also not TOML, or nested too deep
        raise TaskError(f"{path} cannot be read as a mixture: {error}") from error
    entries = tree.get("dataset")
    if tree.keys() != {"dataset"} or not isinstance(entries, list) or not entries:
        raise TaskError(f"{path} is not a mixture: it needs [[dataset]] groups, and nothing else")
    return tuple(_share(entry, where=f"{path}, dataset {n}") for n, entry in enumerate(entries, 1))


def _share(entry: Any, *, where: str) -> Share:
    if not isinstance(entry, dict) or not isinstance(entry.get("task"), str):
        raise TaskError(f"{where}: it names no task")
    if unknown := sorted(entry.keys() - _KEYS):
        raise TaskError(f"{where}: unknown key '{unknown[0]}' (one of: epochs, rows, task)")
    rows, epochs = entry.get("rows"), entry.get("epochs", 1)
    for key, value in (("rows", rows), ("epochs", epochs)):
        # Not isinstance: in TOML `true` is a bool, which Python counts as an int.
        if value is not None and (type(value) is not int or value < 1):
            raise TaskError(f"{where}: {key} is {value!r}, expected a number of at least 1")
    return Share(task=entry["task"], rows=rows, epochs=epochs)
