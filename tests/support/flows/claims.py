"""Those who want to build, in tests of leases."""

from flows.leases.lease import Claimant


def claim(name: str, *, home: str | None = None) -> Claimant:
    """A claim by run `name`, on a machine of its own unless `home` says otherwise."""
    return Claimant(
        owner=f"owner-{name}",
        run=f"run-{name}",
        host=f"host-{name}",
        pid=7,
        home=home or f"home-{name}",
        since="2026-11-21T05:53:38Z",
    )
