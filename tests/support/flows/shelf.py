"""Artifacts, runs and tags that tests put into a store without building anything."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.artifacts.runs import Run, new_run, write_run
from flows.identity.fingerprint import REPOSITORY, Code, fingerprint_of, identify
from flows.identity.manifest import File, Input, Manifest, digest_of
from flows.identity.ref import RUN_ID, ArtifactRef
from flows.profiles import open_profile
from flows.stages import SHARDS
from infra.storage.base import ObjectInfo, Store, VersionedObject
from infra.storage.local import LocalStore
from nanochat_core.section import Tree
from tests.support.flows.rows import PROVENANCE

SECONDS_TO_MEET = 100.0  # of readers that are expected to ask at the same time
CREATED = "2026-11-21T06:00:00Z"
# Of an accepted artifact, in addition to the fingerprint that it comes from.
ACCEPTED = {"earlier": [], "code": {}, "why": "", "when": CREATED, "who": "me", "proof": None}


def make_manifest(
    stage: str,
    *,
    config: Mapping[str, Tree] | None = None,
    code: Mapping[str, Tree] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    inputs: Mapping[str, Manifest] | None = None,
    accepted: dict[str, Any] | None = None,
    **provenance: Any,
) -> Manifest:
    """A manifest that holds together; its files' bytes are nowhere."""
    sources = {
        name: Input(fingerprint=source.fingerprint, digest=source.digest)
        for name, source in (inputs or {}).items()
    }
    preimage: dict[str, Tree] = {
        "stage": stage,
        "format": 1,
        "config": dict(config or {}),
        "inputs": {name: source.digest for name, source in sources.items()},
        "code": dict(code or {}),
    }
    fingerprint = fingerprint_of(preimage)
    contents = files or {"data": "x"}
    made = tuple(_file(stage, fingerprint, "files", p, contents[p]) for p in sorted(contents))
    return Manifest(
        stage=stage,
        fingerprint=fingerprint,
        preimage=preimage,
        files=made,
        logs=(_file(stage, fingerprint, "logs", "events.jsonl", "{}"),),
        digest=digest_of(made),
        inputs=sources,
        provenance=replace(PROVENANCE, **{"created": CREATED, "metrics": {}, **provenance}),
        divergences=(),
        accepted=accepted,
    )


def todays_shards() -> ArtifactRef:
    """The shards that tiny builds with today's code."""
    run = open_profile("tiny").run
    return identify(SHARDS, run, {}, code=Code(REPOSITORY)).ref


def put_artifact(store: Store, manifest: Manifest) -> Manifest:
    """Make it exist, and known to the index."""
    stamp = "".join(c for c in manifest.provenance.created.lower() if c.isalnum())
    store.put(f"{manifest.stage}/{manifest.fingerprint}/manifest.json", manifest.to_json())
    store.put(f"index/{manifest.stage}/{stamp}-{manifest.fingerprint}", b"")
    return manifest


def put_whole(store: Store, manifest: Manifest) -> Manifest:
    """Put an artifact of `make_manifest` with the bytes of its files and logs."""
    for file in (*manifest.files, *manifest.logs):
        store.put(file.key, b"{}" if file.path == "events.jsonl" else b"x" * file.size)
    return put_artifact(store, manifest)


def put_run(
    store: Store, run: str, *manifests: Manifest, name: str = "tiny", **changes: Any
) -> Run:
    """Record a run that made these artifacts."""
    record = replace(
        new_run(run, name, profile="tiny"),
        status="finished",
        started=_started(run),
        ended=CREATED,
        stages={manifest.stage: manifest.fingerprint for manifest in manifests},
    )
    record = replace(record, **changes)
    write_run(store, record)
    return record


def _started(run: str) -> str:
    """The time in a run's id, as real ones have it."""
    if (match := RUN_ID.fullmatch(run)) is None:
        return CREATED
    day, time = match[2].upper().split("T")
    return f"{day[:4]}-{day[4:6]}-{day[6:]}T{time[:2]}:{time[2:4]}:{time[4:]}"


def two_alike(stage: str, digits: int = 4, **provenance: Any) -> tuple[Manifest, Manifest]:
    """Two artifacts whose fingerprints begin with the same digits."""
    seen: dict[str, Manifest] = {}
    for seed in range(100_000):
        manifest = make_manifest(stage, config={"seed": seed}, **provenance)
        other = seen.setdefault(manifest.fingerprint[:digits], manifest)
        if other is not manifest:
            return other, manifest
    raise AssertionError("no two alike")


class Counting(LocalStore):
    """Counts what is asked of the store."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gets: list[str] = []
        self.lists: list[str] = []
        self._lock = threading.Lock()
        self._meetings: dict[str, tuple[threading.Barrier, list[str]]] = {}

    def meet(self, readers: int, name: str) -> None:
        """Have the first reads of objects of this name wait for each other.

        Fails in a reader if fewer of them ever ask at the same time.
        """
        self._meetings[name] = (threading.Barrier(readers), [])

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """See Store."""
        self._count(key)
        return super().get(key, size=size)

    def get_stored(self, key: str) -> VersionedObject:
        """See Store."""
        self._count(key)
        return super().get_stored(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        self.lists.append(prefix)
        return super().list(prefix)

    def kinds(self) -> Counter[str]:
        """Gets by what was asked for: manifest.json, revoked.json, runs, refs."""
        ends = {"runs", "refs"}
        tops = [(key.partition("/")[0], key.rpartition("/")[2]) for key in self.gets]
        return Counter(top if top in ends else last for top, last in tops)

    def _count(self, key: str) -> None:
        barrier, early = self._meetings.get(key.rpartition("/")[2], (None, []))
        with self._lock:
            self.gets.append(key)
            is_early = barrier is not None and len(early) < barrier.parties
            early.append(key)
        if barrier is not None and is_early:
            barrier.wait(SECONDS_TO_MEET)


def _file(stage: str, fingerprint: str, folder: str, path: str, content: str | bytes) -> File:
    data = content.encode() if isinstance(content, str) else content
    return File(
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        key=f"{stage}/{fingerprint}/{folder}/a/{path}",
    )
