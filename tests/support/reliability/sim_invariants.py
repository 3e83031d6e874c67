"""What must hold in every history: checked at every effect on the store, and at the end.

One referee watches one recipe. It knows more than any process: what is stored at each moment, and
which answers each process got.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from flows.artifacts.publish import Published
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Manifest
from tests.support.reliability.histories import Broken
from tests.support.reliability.sim_store import Object, Objects
from tests.support.reliability.sim_world import Process, Request


@dataclass
class Referee:
    """Follows one recipe's objects."""

    objects: Objects
    recipe: Identity
    ttl: float  # of its leases
    contents: set[bytes]  # what stages make, all of it right
    forced: set[str] = field(default_factory=set)  # runs that may ask for another artifact
    owners: dict[Process, str] = field(default_factory=dict)  # of the lease each builds under
    # A manifest is called by the key of its first file, which no other attempt's manifest has.
    visible: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)  # publishing it returned
    revoked: set[str] = field(default_factory=set)
    _files: dict[str, bytes] = field(default_factory=dict)  # of manifests that ever were visible
    _lease_read: dict[Any, bytes] = field(default_factory=dict)  # by thread

    def __post_init__(self) -> None:
        self.met = self.objects.world.met
        self.objects.on_send = self.on_send
        self.objects.on_effect = self.on_effect

    def on_send(self, request: Request) -> None:
        """Handle every request when a process sends it."""
        if request.key.endswith("/manifest.json") and request.verb in ("create", "swap"):
            self._check_fence(request)

    def on_effect(self, request: Request, old: Object | None, new: Object | None) -> None:
        """Handle every effect at the moment it happens."""
        process, key = request.process, request.key
        if key.endswith("/lease.json") and request.verb == "get":
            assert old is not None
            self._lease_read[request.caller] = old.data
        elif request.verb == "get":
            pass
        elif key.endswith("/manifest.json"):
            self._check_manifest(process, old, new)
        elif key.endswith("/lease.json"):
            self._check_lease(process, old, new)
        elif key.endswith("/redo.json"):
            self._check_redo(process, old, new)
        elif key in self._files and (new is None or new.data != self._files[key]):
            raise Broken(f"{process.name} changed {key}, a file of a visible artifact")

    def on_published(self, published: Published, process: Process, attempt: int) -> None:
        """Check what publish returned to a process."""
        key = published.manifest.files[0].key  # each attempt uploads under names of its own
        mine = {"process": process.name, "attempt": attempt}
        ours = published.manifest.provenance.metrics == mine
        if ours == published.adopted:
            raise Broken(f"publish said adopted={published.adopted}, of its own manifest: {ours}")
        if key not in self._files:
            raise Broken(f"publish returned {process.name} a manifest that never was visible")
        self.acknowledged.add(key)
        self.met["adopted" if published.adopted else "published"] += 1
        self.met["divergent"] += published.divergence is not None

    def on_revoked(self, manifest: Manifest) -> None:
        """Note that a process heard that this artifact is revoked."""
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
        for key in self.acknowledged - self.visible:
            raise Broken(f"the acknowledged manifest of {key} is gone")

    def _check_manifest(self, process: Process, old: Object | None, new: Object | None) -> None:
        if new is None:
            raise Broken(f"{process.name} removed the visible manifest")
        if old is None:
            self._check_new(process, new.data)
        elif old.data != new.data:
            raise Broken(f"{process.name} changed a visible manifest")

    def _check_new(self, process: Process, data: bytes) -> None:
        """An artifact comes into being."""
        files = json.loads(data)["files"]
        self.visible.add(files[0]["key"])
        for file in files:
            stored = self.objects.stored.get(file["key"])
            if stored is None:
                raise Broken(f"{process.name} published a manifest before its file {file['key']}")
            if hashlib.sha256(stored.data).hexdigest() != file["sha256"]:
                raise Broken(f"{process.name} published a manifest of a damaged {file['key']}")
            self._files[file["key"]] = stored.data

    def _check_redo(self, process: Process, old: Object | None, new: Object | None) -> None:
        """A run asks, with reason; the number grows by one at most."""
        if new is None:
            raise Broken(f"{process.name} removed the redo counter")
        before = json.loads(old.data)["number"] if old else 0
        after = json.loads(new.data)
        if old is not None and old.data == new.data:  # a request that came twice
            return
        runs = json.loads(old.data)["runs"] if old else []
        if after["number"] not in (before, before + 1) or after["runs"][:-1] != runs:
            raise Broken(f"{process.name} set the redo counter from {before} to {after['number']}")
        revoked = f"{self.recipe.redone(before).ref.prefix}/revoked.json" in self.objects.stored
        if after["runs"][-1] not in self.forced and not revoked:
            raise Broken(f"{process.name} asked again for an artifact that no run is to redo")
        if after["runs"][-1] in runs and not revoked:
            raise Broken(f"{process.name} asked twice for the same run")
        self.met["redone"] += 1

    def _check_fence(self, request: Request) -> None:
        """Check that a process that publishes has just read its own lease.

        What happens to the lease while the request travels is decided by put-if-absent.
        """
        owner = self.owners.get(request.process)
        if owner is None:
            return
        read = self._lease_read.get(request.caller)
        if read is None or json.loads(read)["owner"] != owner:
            raise Broken(f"{request.process.name} publishes although its lease is another's")

    def _check_lease(self, process: Process, old: Object | None, new: Object | None) -> None:
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
                raise Broken(f"{process.name} renewed a lease that was released")
            return
        self.met["lease taken over" if not before["released"] else "lease taken up"] += 1
        age = self.objects.world.now - old.written
        if before["released"] or before["owner"] == after["owner"] or age > self.ttl:
            return
        if self.objects.world.started_as(before).alive:
            raise Broken(f"{process.name} took over a lease that was renewed {age:.0f} s before")
