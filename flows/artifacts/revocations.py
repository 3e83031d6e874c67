"""Revoke an artifact that turned out to be wrong: {stage}/{fingerprint}/revoked.json.

Nothing is deleted: files and manifest stay for inspection. A revoked artifact counts as absent: the
plan builds another one of its recipe (flows/identity/redo.py), and it is not opened by name. Bytes
that were accepted under another fingerprint (flows/plan/accept.py) are the same bytes: they are
revoked with the artifact they came from. What was made from revoked artifacts can be used, with a
warning.
"""

import getpass
import os
import socket
from dataclasses import asdict, dataclass

from flows.artifacts.publish import find_whole
from flows.identity.manifest import Manifest
from flows.identity.record_types import find_record
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class Revocation:
    """The record that an artifact was revoked: the reason, the time and the person."""

    why: str  # one line
    when: str  # UTC, 2026-11-21T05:53:38Z
    who: str  # user@host

    def __str__(self) -> str:
        return f"revoked {self.when} by {self.who}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """A revoked artifact that another one was made from."""

    ref: ArtifactRef
    revocation: Revocation

    def __str__(self) -> str:
        return f"{self.ref.name}, {self.revocation}"


def find_revocation(store: Store, ref: ArtifactRef) -> Revocation | None:
    """Return the revocation of an artifact. None means that the store has answered: none.

    Raises StoreError if the store cannot be reached, ArtifactError if the record is damaged.
    """
    mend = "delete it and revoke the artifact again"
    key, what = ref.revocation_key, "a revocation"
    return find_record(store, key, Revocation, format=FORMAT, what=what, mend=mend)


def revoke(store: Store, manifest: Manifest, *, why: str, who: str, when: str) -> Revocation:
    """Revoke an artifact. Raises ArtifactError if it is revoked already."""
    revocation = Revocation(why=one_line(why), when=when, who=who)
    if not put_revocation(store, manifest.ref, revocation):
        # Read again: who was quicker, and why, belongs in the error.
        earlier = find_revocation(store, manifest.ref)
        raise ArtifactError(
            f"{manifest.name} was {earlier or 'revoked'}",
            hint=f"`nanochat revoke {manifest.name} --undo` makes it valid again",
        )
    return revocation


def put_revocation(store: Store, ref: ArtifactRef, revocation: Revocation) -> bool:
    """Write a revocation unless there is one. Returns whether it was written."""
    data = encode_record(asdict(revocation), format=FORMAT)
    return store.put_if_absent(ref.revocation_key, data)


def undo_revocation(store: Store, manifest: Manifest) -> Revocation:
    """Make a revoked artifact valid again; return its revocation. Raises ArtifactError if none."""
    revocation = find_revocation(store, manifest.ref)
    if revocation is None:
        raise ArtifactError(f"{manifest.name} is not revoked", hint="there is nothing to undo")
    store.delete(manifest.ref.revocation_key)
    return revocation


def find_revoked(store: Store, manifest: Manifest) -> Revoked | None:
    """Return the revocation of an artifact, or of one it was accepted from, or None."""
    for ref in (manifest.ref, *accepted_from(manifest)):
        if (found := find_revocation(store, ref)) is not None:
            return Revoked(ref=ref, revocation=found)
    return None


def check_not_revoked(store: Store, manifest: Manifest) -> tuple[Revoked, ...]:
    """Return the revoked artifacts that this one was made from, to warn of.

    Raises ArtifactError if the artifact itself is revoked.
    """
    found = find_revoked(store, manifest)
    if found is not None:
        same = "" if found.ref == manifest.ref else f" (the bytes of {found.ref.name})"
        raise ArtifactError(
            f"{manifest.name}{same} was {found.revocation}",
            hint="`nanochat run PROFILE` builds another one, to which `nanochat tag` moves a tag; "
            f"`nanochat revoke {found.ref.name} --undo` makes it valid again",
        )
    return ancestors_revoked(store, manifest)


def ancestors_revoked(store: Store, *manifests: Manifest) -> tuple[Revoked, ...]:
    """Return every revoked artifact that these were made from, through any number of stages.

    Each is returned once. An artifact that is gone ends the search on its branch, since its inputs
    are unknown.
    """
    found: dict[Revoked, None] = {}
    refs = list(dict.fromkeys(ref for manifest in manifests for ref in manifest.input_refs))
    for ref in refs:  # it grows meanwhile
        # A damaged one is like one that is gone, since this only warns.
        manifest = find_whole(store, ref)
        if manifest is not None:
            revoked = find_revoked(store, manifest)
            refs += [each for each in manifest.input_refs if each not in refs]
        else:
            record = find_revocation(store, ref)
            revoked = record and Revoked(ref=ref, revocation=record)
        if revoked:
            found[revoked] = None
    return tuple(found)


def accepted_from(manifest: Manifest) -> tuple[ArtifactRef, ...]:
    """Return the artifacts that these bytes were accepted from, latest first."""
    accepted = manifest.accepted
    earlier = (accepted["from"], *accepted["earlier"]) if accepted else ()
    return tuple(ArtifactRef(manifest.stage, fingerprint) for fingerprint in earlier)


def one_line(why: str) -> str:
    """Return a person's reason as one line. Raises ConfigError if it is empty."""
    line = " ".join(why.split())
    if not line or not line.isprintable():
        raise ConfigError("no reason is given", hint='say it in a line: --why "..."')
    return line


def this_person() -> str:
    """Return the person at the command line: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user has no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
