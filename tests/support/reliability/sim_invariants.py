"""What must hold in every history: checked at every effect on the store, and at the end.

One judge watches one fingerprint. It knows more than any process: what is stored at each moment,
and what each process was told.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from flows.artifacts.publish import Published
from flows.identity.manifest import Manifest
from flows.identity.ref import short
from tests.support.reliability.sim_store import Object, Objects
from tests.support.reliability.sim_world import Process, Request


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Judge:
    """Follows one fingerprint's objects."""

    objects: Objects
    place: str  # {stage}/{fingerprint}
    ttl: float  # of its leases
    contents: set[bytes]  # what stages make, all of it right
    strict: bool  # check how artifacts are replaced
    forced: set[str] = field(default_factory=set)  # runs that may replace one
    owners: dict[Process, str] = field(default_factory=dict)  # of the lease each builds under
    # A manifest is called by the key of its first file, which no other attempt's manifest has.
    canonical: str | None = None  # the visible one
    acknowledged: set[str] = field(default_factory=set)  # publishing it returned to somebody
    replaced: dict[str, str] = field(default_factory=dict)  # superseded -> where it is kept
    revoked: set[str] = field(default_factory=set)
    _files: dict[str, bytes] = field(default_factory=dict)  # of manifests that ever were visible
    _manifest_read: dict[Process, bytes] = field(default_factory=dict)
    _lease_read: dict[Any, bytes] = field(default_factory=dict)  # by thread

    def __post_init__(self) -> None:
        self.met = self.objects.world.met
        self._manifest_key = f"{self.place}/manifest.json"
        self._lease_key = f"{self.place}/lease.json"
        self.objects.on_send = self.on_send
        self.objects.on_effect = self.on_effect

    def on_send(self, request: Request) -> None:
        """Told of every request when a process sends it."""
        if request.key == self._manifest_key and request.verb in ("create", "swap"):
            self._judge_fence(request)

    def on_effect(self, request: Request, old: Object | None, new: Object | None) -> None:
        """Told of every effect at the moment it happens."""
        process, key = request.process, request.key
        if key == self._manifest_key:
            if request.verb == "get":
                assert old is not None
                self._manifest_read[process] = old.data
            else:
                self._judge_manifest(process, old, new)
        elif key == self._lease_key:
            if request.verb == "get":
                assert old is not None
                self._lease_read[request.caller] = old.data
            else:
                self._judge_lease(process, old, new)
        elif key in self._files and (new is None or new.data != self._files[key]):
            raise Broken(f"{process.name} changed {key}, a file of a visible artifact")

    def on_published(self, published: Published, process: Process, attempt: int) -> None:
        """What publish told a process."""
        key = published.manifest.files[0].key  # each attempt uploads under names of its own
        told = {"process": process.name, "attempt": attempt}
        ours = published.manifest.provenance.metrics == told
        if ours == published.adopted:
            raise Broken(f"publish said adopted={published.adopted}, of its own manifest: {ours}")
        if key not in self._files:
            raise Broken(f"publish told {process.name} of a manifest that never was visible")
        self.acknowledged.add(key)
        self.met["adopted" if published.adopted else "published"] += 1
        self.met["divergent"] += published.divergence is not None

    def on_revoked(self, manifest: Manifest) -> None:
        """Somebody was told that this artifact is taken back."""
        self.revoked.add(manifest.files[0].key)
        self.met["revoked"] += 1

    def on_used(self, manifest: Manifest, revoked: set[str]) -> None:
        """A run uses this artifact; these were revoked when it asked for one."""
        if manifest.files[0].key in revoked:
            raise Broken(f"{manifest.files[0].key} is used although it was revoked")

    def on_read(self, content: bytes) -> None:
        """Bytes that a reader took for the artifact's."""
        if content not in self.contents:
            raise Broken(f"a reader got {content!r}, which no stage made")
        self.met["read"] += 1

    def on_gone(self, key: str) -> None:
        """A manifest that was visible names an object that is not there."""
        raise Broken(f"{key} of a published artifact is gone")

    def at_end(self) -> None:
        """Nothing that was acknowledged is lost."""
        for key in self.acknowledged - self.replaced.keys():
            if key != self.canonical:
                raise Broken(f"the acknowledged manifest of {key} is gone")
        for key, kept in self.replaced.items() if self.strict else ():
            if kept not in self.objects.stored:
                raise Broken(f"the manifest of {key} was replaced and not kept")

    def _judge_manifest(self, process: Process, old: Object | None, new: Object | None) -> None:
        if new is None:
            raise Broken(f"{process.name} removed the visible manifest")
        if old is None:
            self._judge_new(process, new.data)
        elif old.data != new.data:
            self._judge_replacement(process, old.data)
            self._judge_new(process, new.data)

    def _judge_new(self, process: Process, data: bytes) -> None:
        """An artifact comes into being."""
        files = json.loads(data)["files"]
        self.canonical = files[0]["key"]
        if self.canonical in self.replaced and self.strict:
            raise Broken(f"{process.name} brought back a manifest that was replaced")
        for file in files:
            stored = self.objects.stored.get(file["key"])
            if stored is None:
                raise Broken(f"{process.name} published a manifest before its file {file['key']}")
            if hashlib.sha256(stored.data).hexdigest() != file["sha256"]:
                raise Broken(f"{process.name} published a manifest of a damaged {file['key']}")
            self._files[file["key"]] = stored.data

    def _judge_replacement(self, process: Process, data: bytes) -> None:
        tree = json.loads(data)
        kept = f"{self.place}/superseded/{short(tree['digest'])}.json"
        if not self.strict:
            raise Broken(f"{process.name} changed the visible manifest")
        if self._manifest_read.get(process) != data:
            raise Broken(f"{process.name} replaced a manifest that it never saw")
        if kept not in self.objects.stored:
            raise Broken(f"{process.name} replaced a manifest without keeping it")
        # Any run finishes a rebuild that a forced one began.
        if not self.forced and not self._is_revoked():
            raise Broken(f"{process.name} replaced an artifact that no run is to build again")
        self.replaced[tree["files"][0]["key"]] = kept
        self.met["replaced"] += 1

    def _is_revoked(self) -> bool:
        """Whether somebody has asked, perhaps without an answer yet, for this to be taken back."""
        return f"{self.place}/revoked.json" in self.objects.stored

    def _judge_fence(self, request: Request) -> None:
        """Who publishes under a lease asked for it just before, and was told that it is its own.

        What happens to the lease while the request travels, nobody can help: put-if-absent decides.
        """
        owner = self.owners.get(request.process)
        if owner is None:
            return
        read = self._lease_read.get(request.caller)
        if read is None or json.loads(read)["owner"] != owner:
            raise Broken(f"{request.process.name} publishes although its lease is another's")

    def _judge_lease(self, process: Process, old: Object | None, new: Object | None) -> None:
        if new is None:
            raise Broken(f"{process.name} removed the lease record, and its epoch with it")
        if old is None:
            return
        before, after = json.loads(old.data), json.loads(new.data)
        if after["epoch"] < before["epoch"]:
            raise Broken(f"{process.name} took the epoch back to {after['epoch']}")
        if after["epoch"] == before["epoch"]:
            if after["owner"] != before["owner"]:
                raise Broken(f"{process.name} shares epoch {after['epoch']} with another owner")
            if before["released"]:
                raise Broken(f"{process.name} renewed a lease that was given back")
            return
        self.met["lease taken over" if not before["released"] else "lease taken up"] += 1
        age = self.objects.world.now - old.written
        if not before["released"] and before["home"] != after["home"] and age <= self.ttl:
            raise Broken(f"{process.name} took over a lease that was renewed {age:.0f} s before")
