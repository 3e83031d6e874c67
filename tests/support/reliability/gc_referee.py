"""Watches every effect on a simulated store and says when garbage collection broke a promise.

It keeps its own account of what names what, from the bytes that are written, and asks none of the
collector's code.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

from flows.gc.reach import Rules
from flows.identity.manifest import Manifest
from tests.support.reliability.histories import Broken
from tests.support.reliability.sim_store import Object, Objects
from tests.support.reliability.sim_world import Process, Request

Place: TypeAlias = tuple[str, str]  # stage, fingerprint
_SLACK = 60.0  # virtual seconds between what a collection read and what it deletes for it


class Referee:
    """The promises:

    - an artifact that a run found or made is whole as long as the run's record has to be kept
    - so is one that a run uses which a tag points at
    - a manifest that exists has its files
    - what is young, or under a live lease, is not deleted
    """

    def __init__(self, objects: Objects, rules: Rules, *, ttl: float) -> None:
        self.objects = objects
        self.rules = rules
        self.collectors: set[Process] = set()
        self._ttl = ttl
        self._records: dict[str, dict[str, Any]] = {}  # what is stored now, parsed
        self._written: dict[str, float] = {}  # when
        self._named_by: dict[str, set[str]] = defaultdict(set)  # file's key -> manifests
        self._promised: dict[str, set[Place]] = defaultdict(set)  # by run
        self._tagged: dict[str, str] = {}  # tags that were set with all care, and their runs
        objects.on_effect = self._on_effect

    def on_started(self, run: str) -> None:
        """A run begins, perhaps anew: what it had before it has to get again."""
        self._promised[run].clear()

    def on_artifact(self, run: str, manifest: Manifest) -> None:
        """A run got an artifact; from now on it is promised to it."""
        place = (manifest.stage, manifest.fingerprint)
        self._promised[run].add(place)
        for found in self._whole(place):
            self._check_files(found)
        if _manifest(place) not in self._records:
            raise Broken(f"{run} was given {manifest.name}, which does not exist")

    def on_made(self, manifest: Manifest) -> None:
        """An artifact was published."""
        self._check_files(_manifest((manifest.stage, manifest.fingerprint)))

    def on_tagged(self, name: str, run: str) -> None:
        """A tag was pointed at a run that is there."""
        if f"runs/{run}.json" not in self._records:
            raise Broken(f"tag {name} was pointed at {run}, whose record is gone")
        self._tagged[name] = run

    # What the store is asked to do.

    def _on_effect(self, request: Request, old: Object | None, new: Object | None) -> None:
        process, key = request.process, request.key
        if request.verb == "get":
            return
        if new is None and process in self.collectors:
            self.objects.world.met["deleted"] += 1
            self._check_deletion(key, old)
        if new is None and key.endswith("/manifest.json") and process not in self.collectors:
            raise Broken(f"{process.name} removed {key}")
        if _is_record(key):
            self._note(key, new)

    def _note(self, key: str, new: Object | None) -> None:
        """Keep account of a record that was written or removed."""
        for name in _names(self._records.pop(key, {})):
            self._named_by[name].discard(key)
        record = json.loads(new.data) if new else None
        if record is not None:
            self._records[key] = record
            self._written[key] = self.objects.stored[key].written
            for name in _names(record):
                self._named_by[name].add(key)
        if key.startswith("refs/"):  # from now on it is another's promise
            self._tagged.pop(key.removeprefix("refs/").removesuffix(".json"), None)

    def _check_deletion(self, key: str, old: Object | None) -> None:
        assert old is not None, key
        age = self.objects.world.now - old.written
        if age < min(self.rules.grace, self.rules.keep) and not key.endswith("/lease.json"):
            raise Broken(f"{key} was deleted when it was {age:.0f} s old")
        if key.startswith("runs/"):
            if key in {f"runs/{run}.json" for run in self._runs_kept(margin=_SLACK)}:
                raise Broken(f"{key} was deleted, which has to be kept")
        elif key.startswith("names/"):
            if key.rpartition("/")[2].partition("-")[2] in self._runs_kept(margin=_SLACK):
                raise Broken(f"{key} was deleted, whose run has to be found")
        elif _is_in_place(key):
            self._check_part(_place(key), _part(key), key)

    def _check_part(self, place: Place, part: str, key: str) -> None:
        if part not in ("files", "logs", "checkpoints") or key.endswith("/COMMIT.json"):
            self._check_lease(place, key)
        if part == "manifest.json":
            self._check_unpromised(place)
        elif part == "revoked.json":
            self._check_revocation(place)
        elif part == "redo.json":
            raise Broken(f"{key} was deleted, without which plans find another artifact")
        for manifest in self._named_by.get(key, ()):
            if manifest.endswith("/manifest.json"):
                raise Broken(f"{key} was deleted, which {manifest} names")

    def _check_lease(self, place: Place, key: str) -> None:
        record = self._records.get(f"{place[0]}/{place[1]}/lease.json")
        if record is None or record["released"] or record["run"] == "gc":
            return
        written = self._written[f"{place[0]}/{place[1]}/lease.json"]
        if self.objects.world.now - written < self._ttl - _SLACK:
            raise Broken(f"{key} was deleted, which run {record['run']} has a lease on")

    def _check_unpromised(self, place: Place) -> None:
        for run in self._runs_kept(margin=_SLACK):
            if place in self._closure(self._promised[run]):
                raise Broken(f"the manifest of {place} was deleted, which {run} needs")

    def _check_revocation(self, place: Place) -> None:
        there = {key for key in self._records if key.endswith("/manifest.json")}
        if self._is_under(place, there):
            raise Broken(f"the revocation of {place} was deleted, which an artifact is under")

    # What names what.

    def _runs_kept(self, *, margin: float = 0.0) -> set[str]:
        """Runs whose record has to be there: heard of lately, tagged, newest finished of a name."""
        records = {k: r for k, r in self._records.items() if k.startswith("runs/")}
        tagged = set(self._tagged.values())
        newest: dict[str, tuple[str, str]] = {}
        for record in records.values():
            if record["status"] == "finished":
                mine = (record["started"], record["run"])  # as a name means it
                newest[record["name"]] = max(newest.get(record["name"], mine), mine)
        latest = {run for _, run in newest.values()}
        now = self.objects.world.now
        return {
            record["run"]
            for key, record in records.items()
            if now - self._written[key] <= self.rules.keep - margin
            or record["run"] in tagged | latest
        }

    def _closure(self, places: Iterable[Place]) -> set[Place]:
        """These artifacts and all that they were made from, as far as it exists."""
        found: set[Place] = set()
        todo = list(places)
        while todo:
            place = todo.pop()
            if place not in found:
                found.add(place)
                record = self._records.get(_manifest(place), {"inputs": {}})
                todo += [(s, source["fingerprint"]) for s, source in record["inputs"].items()]
        return found

    def _whole(self, place: Place) -> list[str]:
        """Manifests of an artifact and its inputs. Raises Broken when one is missing."""
        manifests: list[str] = []
        for other in self._closure([place]):
            if _manifest(other) in self._records:
                manifests.append(_manifest(other))
            else:
                raise Broken(f"{other}, which {place} was made from, does not exist")
        return manifests

    def _check_files(self, manifest: str) -> None:
        record = self._records.get(manifest)
        if record is None:
            return
        for file in (*record["files"], *record["logs"]):
            if file["key"] not in self.objects.stored:
                raise Broken(f"{file['key']} is gone, which {manifest} names")

    def _is_under(self, place: Place, manifests: Iterable[str]) -> bool:
        """Whether one of these is of this place, or of bytes that were accepted from it."""
        for key in manifests:
            accepted = self._records[key]["accepted"] or {"from": None, "earlier": []}
            froms = (_place(key)[1], accepted["from"], *accepted["earlier"])
            if key.startswith(f"{place[0]}/") and place[1] in froms:
                return True
        return False


def _manifest(place: Place) -> str:
    return f"{place[0]}/{place[1]}/manifest.json"


def _place(key: str) -> Place:
    stage, fingerprint, *_ = key.split("/")
    return stage, fingerprint


def _names(record: dict[str, Any]) -> list[str]:
    """Keys that a manifest names."""
    return [file["key"] for part in ("files", "logs") for file in record.get(part, ())]


def _part(key: str) -> str:
    """What a key is: its first word, or what it is of its artifact."""
    return key.split("/")[2 if _is_in_place(key) else 0]


def _is_in_place(key: str) -> bool:
    return key.split("/")[0] not in ("gc", "refs", "runs", "index", "names")


def _is_record(key: str) -> bool:
    names = ("/manifest.json", "/lease.json", "/revoked.json")
    return key.startswith(("runs/", "refs/")) or key.endswith(names)
