"""How much memory a process may still take: the machine's, or its container's where that is less.

Linux says what a group of processes may take in files, of two kinds: control groups v2 and v1. What
the files name as taken includes pages of files that were read, which go when memory is needed.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Of a version: its folder in GROUPS, limit, bytes taken, the line in memory.stat of unused files.
V2 = ("", "memory.max", "memory.current", "inactive_file")
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left() -> int:
    """Bytes; 0 where the limit is reached."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Of each group that this process is in, from its own up to the outermost one."""
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
    """None: there is no such group here, or no limit."""
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
