"""Claims to build, in tests of leases."""

from dataclasses import replace
from typing import Any

from flows.leases.lease import Lease
from flows.leases.process import Process


def claim(name: str, **changes: Any) -> Lease:
    """Return a claim by run `name`, of a process on a machine of its own, with these changes."""
    elsewhere = Lease(
        owner=f"owner-{name}",
        run=f"run-{name}",
        host=f"host-{name}",
        pid=7,
        machine=f"machine-{name}",
        boot=f"boot-{name}",
        namespace="pid:[4026531836]",
        start=1,
    )
    return replace(elsewhere, **changes)


def dead_here() -> dict[str, Any]:
    """Return the fields of a process of this machine that has ended: no number is so large."""
    return {**vars(Process.this()), "pid": 2**22 + 1}
