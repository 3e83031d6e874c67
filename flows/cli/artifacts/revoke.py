"""`nanochat revoke`: mark an artifact as invalid, so that the next run builds another one."""

import time

from flows.artifacts.names import open_artifact
from flows.artifacts.revocations import revoke as revoke_artifact
from flows.artifacts.revocations import this_person, undo_revocation
from flows.artifacts.runs import timestamp
from flows.cli.options import ArtifactName, StoreOptions
from flows.cli.output import print_lines
from nanochat_core.errors import ConfigError


def revoke(
    reference: ArtifactName,
    /,
    *,
    why: str | None = None,
    undo: bool = False,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Mark an artifact as invalid: it counts as not there, and the next run builds another one.

    Its files stay. Whatever was made from it is flagged in every plan.

    Args:
        why: What is wrong with it, in a line; it is recorded.
        undo: Make it valid again.
    """
    if undo and why is not None:
        raise ConfigError("--undo takes no --why", hint="give one of them")
    # A missing --why is refused by `revoke_artifact`, together with an empty one.
    store = place.open_store()
    manifest = open_artifact(store, reference)
    if undo:
        before = undo_revocation(store, manifest)
        print_lines([f"{manifest.name} is valid again; it was {before}"])
        return
    revocation = revoke_artifact(
        store, manifest, why=why or "", who=this_person(), when=timestamp(time.time())
    )
    print_lines([f"{manifest.name} {revocation}"])
