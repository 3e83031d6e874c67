"""Accept an artifact after a refactor: publish its files under today's fingerprint.

Only code, or the number of the files' format, may differ: configuration and the contents of every
input are equal. A person states that the change does not affect results, or has it proven
(prove.py). The new manifest names the older artifact's files, and `accepted` records the source and
the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flows.artifacts.publish import Published, commit, newest_manifests
from flows.artifacts.revocations import accepted_from, find_revoked, one_line
from flows.artifacts.transfer import find_sizes
from flows.identity.diff import PASSED_ON, Change, compare, nearest
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Facts, Input, Manifest
from flows.plan.plan import Plan
from flows.render.text import listed
from flows.stages import Stage
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError
from nanochat_core.section import Tree

_CANDIDATES = 20  # newest artifacts of a stage that are compared
_SHOWN_CHANGES = 3


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An artifact that may be accepted under another fingerprint."""

    manifest: Manifest
    stage: Stage
    identity: Identity  # today's
    inputs: dict[str, Manifest]  # today's
    what_changed: str  # between the two, the first few changes


def find_offer(
    store: Store, plan: Plan, stage: str, *, origin: Manifest | None = None
) -> Offer | None:
    """Find what can be accepted for a stage of the plan: `origin`, else the newest that fits.

    None means the stage is up to date. Raises ArtifactError with the differences if nothing can be
    accepted.
    """
    item = plan.of(stage)
    if item.state == "=":
        return None
    if item.identity is None:
        first = ", ".join(item.after)
        raise ArtifactError(
            f"{stage} cannot be accepted before {first}: its inputs do not exist yet",
            hint=f"accept or run {first} first",
        )
    if item.revoked is not None:
        raise ArtifactError(
            f"{stage} was {item.revoked.revocation}",
            hint=f"run it again, or: nanochat revoke {item.revoked.ref.name} --undo",
        )
    inputs = {source.name: plan.of(source.name).manifest for source in item.stage.inputs}
    if origin is None:
        origin = _find_origin(store, item.identity)
    elif origin.stage != stage:
        raise ConfigError(
            f"{origin.name} is of stage {origin.stage}, not {stage}",
            hint=f"name one like {stage}/1a2b3c",
        )
    changes = compare(origin.preimage, item.identity.preimage)
    if decisive := _decisive(changes):
        raise ArtifactError(
            f"{origin.name} cannot be accepted: {listed(decisive, _SHOWN_CHANGES)}",
            hint="only code may differ, not configuration or inputs: run the stage, or name "
            f"another artifact with --from {stage}/1a2b3c",
        )
    if revoked := find_revoked(store, origin):
        raise ArtifactError(
            f"{origin.name} cannot be accepted: {revoked}", hint="run the stage again"
        )
    return Offer(
        manifest=origin,
        stage=item.stage,
        identity=item.identity,
        inputs={name: manifest for name, manifest in inputs.items() if manifest},
        what_changed=listed(changes, _SHOWN_CHANGES),
    )


def accept(
    store: Store, offer: Offer, *, why: str, who: str, when: str, proof: Facts | None
) -> Published:
    """Publish the offered files under today's fingerprint.

    Raises ArtifactError if one of them is not in the store. The caller pins the older artifact
    (flows/artifacts/pins.py), which keeps it from garbage collection.
    """
    old = offer.manifest
    # Code may change back: the new fingerprint can be one that these files had before.
    earlier = [ref.fingerprint for ref in accepted_from(old) if ref != offer.identity.ref]
    manifest = replace(
        old,
        fingerprint=offer.identity.fingerprint,
        preimage=offer.identity.preimage,
        inputs={
            name: Input(fingerprint=source.fingerprint, digest=source.digest)
            for name, source in offer.inputs.items()
        },
        divergences=(),
        accepted={
            "from": old.fingerprint,
            "earlier": earlier,
            # Of the build itself, however often it was accepted since: a later proof runs that.
            "code": code_that_made(old),
            "why": one_line(why),
            "when": when,
            "who": who,
            "proof": proof,
        },
    )
    _check_there(store, old)  # the pin may have expired under a slow command
    return commit(store, manifest)


def code_that_made(manifest: Manifest) -> Tree:
    """Return the digests of the code that made the files, also for an accepted artifact."""
    return manifest.accepted["code"] if manifest.accepted else manifest.preimage["code"]


def _find_origin(store: Store, identity: Identity) -> Manifest:
    """Return the newest artifact that differs only in code, else the one that differs least.

    The latter cannot be accepted either, but its error shows which settings differ.
    """
    newest = list(newest_manifests(store, identity.stage, _CANDIDATES))
    alike = (m for m in newest if not _decisive(compare(m.preimage, identity.preimage)))
    fits = (manifest for manifest in alike if find_revoked(store, manifest) is None)
    found = next(fits, None) or nearest(newest, identity.preimage)
    if found is None:
        raise ArtifactError(
            f"there is no artifact of {identity.stage} in {store.url} to accept",
            hint="run the stage",
        )
    return found


def _decisive(changes: Iterable[Change]) -> list[Change]:
    """Return the changes that rule out accepting: configuration and inputs."""
    return [change for change in changes if change.kind in ("config", *PASSED_ON)]


def _check_there(store: Store, manifest: Manifest) -> None:
    """Raise ArtifactError unless the store has every file of the manifest in its right size."""
    files = (*manifest.files, *manifest.logs)
    found = [
        f"{file.path} is gone" if size is None else f"{file.path} has {size} bytes, not {file.size}"
        for file, size in zip(files, find_sizes(store, files), strict=True)
        if size != file.size
    ]
    if found:
        raise ArtifactError(
            f"the files of {manifest.name} are not in {store.url}: {listed(found, 1)}",
            hint="run the stage again",
        )
