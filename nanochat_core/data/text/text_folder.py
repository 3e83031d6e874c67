"""The state of a folder or bucket of text, which a plan records and a job compares.

It is computed from names, sizes and times: reading the content would make plans take minutes.
"""

import hashlib
import os
from itertools import chain, repeat
from pathlib import Path

from nanochat_core.errors import DataError, reason_of


def folder_snapshot(folder: Path) -> tuple[str, ...]:
    """Return one line that depends on names, sizes and modification times of all files below.

    Raises DataError if the folder or a file in it cannot be read.
    """
    facts: list[str] = []
    for path in sorted(files_below(folder)):
        status = _status(path)
        facts.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return snapshot_of(facts)


def snapshot_of(facts: list[str]) -> tuple[str, ...]:
    """Return the snapshot of files of which these are the facts, one line a file."""
    return (f"{len(facts)} files {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}",)


def check_snapshot(where: object, found: tuple[str, ...], planned: tuple[str, ...]) -> None:
    """Raise DataError if the text at `where` has changed since the run was planned."""
    if found != planned:
        raise DataError(
            f"{where} has changed since the run was planned: it holds {', '.join(found)}, "
            f"the plan has {', '.join(planned) or 'no snapshot'}",
            hint="run again: a new plan uses the current text",
        )


def files_below(folder: Path) -> list[Path]:
    """Return every file below `folder` but hidden ones, also behind links to other folders.

    A folder to which several names lead is read once. Raises DataError for one that cannot be read.
    """

    # Not rglob, which silently skips a folder without read permission.
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    found: list[Path] = []
    seen: set[str] = set()  # a link may lead to a folder above it
    for directory, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        # Sorted: which of several names comes first must not depend on the disk.
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        if (real := os.path.realpath(directory)) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [path for name in names if (path := Path(directory, name)).is_file()]
    return [path for path in found if not is_hidden(path.name)]


def is_hidden(path: str, *, named: str = "") -> bool:
    """Return whether a relative path is of a hidden file or folder, or of what macOS adds.

    `named`: the folder or pattern that a user gave, which is read although it is hidden: `*` names
    nothing hidden, `.cache/*` does.
    """
    pairs = zip(path.split("/"), chain(named.split("/"), repeat("")), strict=False)
    return any(
        (part.startswith(".") or part == "__MACOSX") and part[0] != given[:1]
        for part, given in pairs
    )


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:  # removed since the folder was listed
        raise unreadable(path, error) from error


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error on a file or folder of text that cannot be read."""
    return DataError(
        f"{path} cannot be read: {reason_of(error)}",
        hint="let this account read it, or remove it from the folder",
    )
