"""The memory that a process may still allocate: the machine's, or its container's if less.

Linux reports the limits of control groups in files, of which there are two versions, v2 and v1. The
reported usage includes cached pages of files, which the kernel frees when memory is needed.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Per version: its folder in GROUPS, limit, usage in bytes, memory.stat's line of inactive files.
V2 = ("", "memory.max", "memory.current", "inactive_file")
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left() -> int:
    """Return the bytes that may still be allocated; 0 if the limit is reached."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes left in each control group of this process, from its own to the root."""
    # Every ancestor's limit applies too, so the smallest counts.
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers != "" and "memory" not in controllers.split(","):
            continue
        version = V1 if controllers else V2
        root = GROUPS / version[0]
        own = root / path.lstrip("/")  # in a container this may be the host's name for it
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                left = _left_in(folder, version)
                if left is not None:
                    yield left


def _left_in(folder: Path, version: tuple[str, str, str, str]) -> int | None:
    """Return the bytes left in a control group. None means no such group or no limit."""
    _, limit, taken, unused = version
    try:
        room = int((folder / limit).read_text()) - int((folder / taken).read_text())
    except (OSError, ValueError):  # "max"
        return None
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return room + int(fields.get(unused, 0))
    except (OSError, ValueError):
        return room
