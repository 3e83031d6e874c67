"""Damaged objects, thousands of them: each is found before it is used, and no wrong byte comes out.

One object is damaged in each trial: in the store or in the cache (on the way from the store: the
faults of fault_pipeline.py). Then the artifact it belongs to is opened by name and fetched. It must
come out right, or not at all with an error that names what is damaged. A record that is rolled back
is whole, and nothing can detect it: then the older state must come out, and nothing in between.

In the store run tiny-1 made an older artifact of each stage and run tiny-2 a newer one. The tag
main stands for tiny-2, the tag best for tiny-1.
"""

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import open_artifact
from flows.artifacts.publish import publish
from flows.artifacts.runs import point
from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from nanochat_core.errors import NanochatError
from tests.support.flows.rows import PROVENANCE, identity_of
from tests.support.flows.shelf import put_run

Contents: TypeAlias = Mapping[str, bytes]  # of an artifact's files, by path
LIMIT = 10**12
KINDS = ("flip", "truncate", "extend", "swap", "stale", "delete")
RECORDS = ("manifest", "run", "tag")
OBJECTS = ("file", "log", *RECORDS)  # in the store
COPIES = ("cached file", "cached manifest")
PLACES = (*OBJECTS, *COPIES)
NAMED, RIGHT, OLDER, WRONG = "a named error", "the right bytes", "an older state", "WRONG"
FILES = {
    "shards": ("shard_00000.parquet", "shard_00001.parquet", "index.json"),
    "tokens": ("train/00000.u16", "train/00000.lengths", "tokens.json"),
    "sft": ("model.safetensors", "config.json", "tokenizer/tokenizer.json"),
    "report": ("report.html", "report.md"),
}
RUN, OLD_RUN = "tiny-2", "tiny-1"
EARLY = ("shards", "tokens")  # what tiny-2 knew when it had just begun


class Damages:
    """Trials on one store, which is whole again after each."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        places: Sequence[str] = PLACES,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self.outcomes = Counter[str]()
        self.faults: list[str] = []
        self._places, self._kinds = places, kinds
        self._generator = random.Random(seed)
        self._directory = directory
        self._root = directory / "store"
        self._store = store = LocalStore(self._root)
        self._contents: dict[str, Contents] = {}  # by digest of the artifact
        self._old = {stage: self._make(stage, OLD_RUN) for stage in FILES}
        self._new = {stage: self._make(stage, RUN) for stage in FILES}
        self._earlier: dict[str, bytes] = {}  # record -> what it held before
        put_run(store, OLD_RUN, *self._old.values(), started="2026-11-20T06:00:00Z")
        put_run(store, RUN, *(self._new[stage] for stage in EARLY), status="running", ended=None)
        point(store, "best", OLD_RUN)
        point(store, "main", OLD_RUN)
        for key in (f"runs/{RUN}.json", "refs/main.json"):
            self._earlier[key] = store.get(key)
        put_run(store, RUN, *self._new.values())
        point(store, "main", RUN)
        self._keys = [entry.key for entry in store.list("")]
        self._cache = directory / "cache"
        for item in self._new.values():
            with Cache(self._cache, LIMIT) as cache:
                fetch(store, item, cache)

    def run(self, trials: int) -> None:
        """Damage, look, mend; again and again."""
        for _ in range(trials):
            place = self._generator.choice(self._places)
            kind = self._generator.choice(self._kinds)
            item = self._new[self._generator.choice(list(self._new))]
            (self._damage_copy if place in COPIES else self._damage_object)(place, kind, item)

    def summary(self) -> str:
        """Return how often each outcome was, in a line."""
        counts = ", ".join(f"{count:,} {name}" for name, count in self.outcomes.most_common())
        return f"{self.outcomes.total():,} damages: {counts}; {len(self.faults)} faults"

    def _make(self, stage: str, run: str) -> Manifest:
        """Publish an artifact of a run."""
        files = {name: self._bytes_of(name) for name in FILES[stage]}
        output = self._directory / "output" / f"{stage}-{run}"
        for name, data in files.items():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_bytes(data)
        log = output.with_suffix(".jsonl")
        log.write_bytes(self._bytes_of("events.jsonl"))
        made = publish(
            self._store,
            identity_of(stage, run=run),
            output,
            logs=[log],
            inputs={},
            provenance=dataclasses.replace(PROVENANCE, run=run),
        )
        self._contents[made.manifest.digest] = files
        return made.manifest

    def _bytes_of(self, name: str) -> bytes:
        """Some content; text where the name promises text."""
        size = self._generator.randrange(200, 6000)
        if name.endswith((".json", ".jsonl", ".md", ".html")):
            return bytes(self._generator.choice(b'{}[]"abc 0123\n') for _ in range(size // 4))
        return self._generator.randbytes(size)

    def _damage_object(self, place: str, kind: str, item: Manifest) -> None:
        """In the store."""
        key = self._object_of(place, item)
        path = self._root / key
        whole = path.read_bytes()
        damaged = self._damaged(kind, key, whole)
        if damaged == whole:
            return
        run = "main" if place == "tag" else self._generator.choice(("tiny", "main", RUN))
        is_older = key in self._earlier and damaged == self._earlier[key]
        if run == "tiny":  # a name stands for the newest finished run that has such an artifact
            older = is_older or (damaged is None and place in ("run", "manifest"))
        else:
            older = is_older and place == "tag"
        named = {key}
        if damaged is None or is_older:
            named |= {f"there is no {item.stage}@{run}", RUN}
        _write(path, damaged)
        fresh = self._directory / "fresh"
        self._look(f"{place} {kind}", f"{item.stage}@{run}", named, fresh, older=older)
        _write(path, whole)
        shutil.rmtree(fresh, ignore_errors=True)

    def _object_of(self, place: str, item: Manifest) -> str:
        """Return the key of an object to damage."""
        match place:
            case "file":
                return self._generator.choice(item.files).key
            case "log":
                return self._generator.choice(item.logs).key
            case "manifest":
                return f"{item.ref.prefix}/manifest.json"
            case "run":
                return f"runs/{RUN}.json"
            case _:
                return "refs/main.json"

    def _look(
        self,
        what: str,
        name: str,
        named: set[str],
        cache: Path,
        *,
        older: bool = False,
    ) -> None:
        """Fetch what a name stands for; compare it with what it is, or was if it may be `older`.

        An error must contain one of `named`.
        """
        try:
            found = _fetched(self._store, name, cache)
        except NanochatError as error:
            text = f"{error} {error.hint}"
            outcome = NAMED if any(each in text for each in named) else f"names nothing: {text}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            outcome = f"{type(error).__name__}: {error}"
        else:
            stage = name.partition("@")[0]
            is_older = older and found == self._contents[self._old[stage].digest]
            is_right = found == self._contents[self._new[stage].digest]
            outcome = RIGHT if is_right else OLDER if is_older else WRONG
        self.outcomes[outcome] += 1
        if outcome not in (NAMED, RIGHT, OLDER):
            self.faults.append(f"{what} of {name}: {outcome}")

    def _damage_copy(self, place: str, kind: str, item: Manifest) -> None:
        """In the cache: it must be mended, and nothing else fetched."""
        file = self._generator.choice([*item.files, *item.logs])
        folder = "files" if file in item.files else "logs"
        with Cache(self._cache, LIMIT) as cache:
            directory = cache.use(item)
        path = directory / folder / file.path
        if place == "cached manifest":
            path = directory / "manifest.json"
        whole = path.read_bytes()
        damaged = self._damaged(kind, file.key, whole)
        if damaged == whole:
            return
        _write(path, damaged)
        name = f"{item.stage}@tiny"
        self._look(f"{place} {kind}", name, set(), self._cache)
        if not path.exists() or path.read_bytes() != whole:
            self.faults.append(f"{place} {kind} of {name}: {path.name} was not mended")
            _write(path, whole)

    def _damaged(self, kind: str, key: str, whole: bytes) -> bytes | None:
        """Return what an object holds after damage. None means it is gone."""
        generator = self._generator
        if kind == "delete":
            return None
        if kind == "stale" and key in self._earlier:
            return self._earlier[key]
        if kind == "truncate":
            return whole[: generator.randrange(len(whole))]
        if kind == "extend":
            return whole + generator.randbytes(generator.randrange(1, 64))
        if kind == "swap":
            return self._store.get(generator.choice(self._others(key)))
        place = generator.randrange(len(whole))
        flipped = whole[place] ^ (1 << generator.randrange(8))
        return whole[:place] + bytes([flipped]) + whole[place + 1 :]

    def _others(self, key: str) -> list[str]:
        """Return objects to change places with: mostly of one kind, which is harder to find."""
        others = [other for other in self._keys if other != key]
        alike = [other for other in others if other.rpartition("/")[2] == key.rpartition("/")[2]]
        near = [other for other in others if other.partition("/")[0] == key.partition("/")[0]]
        return self._generator.choice([alike, near, others]) or near


def _fetched(store: LocalStore, name: str, cache: Path) -> Contents:
    """Return an artifact's files, as a stage would read them."""
    item = open_artifact(store, name)
    with Cache(cache, LIMIT) as local:
        files = fetch(store, item, local) / "files"
        return {
            path.relative_to(files).as_posix(): path.read_bytes()
            for path in files.rglob("*")
            if path.is_file()
        }


def _write(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)  # a cached file may be a link to the store's object
    if data is not None:
        path.write_bytes(data)
