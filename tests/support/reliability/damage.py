"""Damaged objects, thousands of them: each is found before it is used, and no wrong byte comes out.

One object is damaged in each trial: in the store, on the way from it, or in the cache. Then the
artifact it belongs to is opened by name and fetched. It must come out right, or not at all with an
error that names what is damaged. Where nothing can be told from the bytes, because they are an
older, whole state of a record, that older state must come out, and nothing in between.

In the store run tiny-1 made the artifacts of generation 0, run tiny-2 those of generation 1. Each
of generation 1 was asked for again, and came out otherwise than before. The tag main stands for
tiny-2, the tag best for tiny-1.
"""

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import open_artifact
from flows.artifacts.publish import publish
from flows.artifacts.runs import point
from flows.identity.manifest import Manifest
from infra.retry import TRIES
from infra.storage.base import ObjectNotFound, OnBytes, VersionedObject, ignore_bytes
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
WAYS = {"answered wrongly at first": TRIES - 1, "answered wrongly always": 10**9}
PLACES = (*OBJECTS, *COPIES, *WAYS)
NAMED, RIGHT, OLDER, WRONG = "a named error", "the right bytes", "an older state", "WRONG"

# What each stage of the pipeline leaves, by name.
FILES = {
    "shards": ("shard_00000.parquet", "shard_00001.parquet", "index.json"),
    "task_data": ("gsm8k_train.jsonl", "arithmetic_test.jsonl"),
    "tokenizer": ("tokenizer.tiktoken", "tokenizer.json"),
    "tokens": ("train/00000.u16", "train/00000.lengths", "tokens.json"),
    "rows": ("train.rows", "val.rows", "rows.json"),
    "pretrain": ("model.safetensors", "config.json", "tokenizer/tokenizer.tiktoken"),
    "base_eval": ("scores.json", "samples.jsonl"),
    "sft": ("model.safetensors", "config.json", "tokenizer/tokenizer.json"),
    "report": ("report.html", "report.md"),
}
RUN, OLD_RUN = "tiny-2", "tiny-1"
EARLY = ("shards", "task_data", "tokenizer", "tokens")  # what tiny-2 knew when it had just begun


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, and everything that was ever true in it."""

    directory: Path
    old: dict[str, Manifest]  # generation 0, by stage
    new: dict[str, Manifest]  # generation 1
    contents: dict[str, Contents]  # by digest of the artifact
    earlier: dict[str, bytes]  # object -> what it held before, where it held something else

    @property
    def store(self) -> LocalStore:
        """The store as it is."""
        return LocalStore(self.directory)

    def path(self, key: str) -> Path:
        """Where an object's bytes are."""
        return self.directory / key

    def truth(self, manifest: Manifest) -> Contents:
        """The bytes of an artifact's files."""
        return self.contents[manifest.digest]


def make_world(directory: Path, *, seed: int) -> World:
    """Fill a store."""
    generator = random.Random(seed)
    store = LocalStore(directory / "store")
    contents: dict[str, Contents] = {}

    def make(stage: str, number: int, run: str, redo: int = 0) -> Manifest:
        files = {name: _bytes_of(name, generator) for name in FILES[stage]}
        output = directory / "output" / f"{stage}-{number}-{run}"
        for name, data in files.items():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_bytes(data)
        log = output.with_suffix(".jsonl")
        log.write_bytes(_bytes_of("events.jsonl", generator))
        manifest = publish(
            store,
            identity_of(stage, number=number).redone(redo),
            output,
            logs=[log],
            inputs={},
            provenance=dataclasses.replace(PROVENANCE, run=run),
        ).manifest
        contents[manifest.digest] = files
        return manifest

    old = {stage: make(stage, 0, OLD_RUN) for stage in FILES}
    first = {stage: make(stage, 1, OLD_RUN) for stage in FILES}
    new = {stage: make(stage, 1, RUN, redo=1) for stage in FILES}
    earlier: dict[str, bytes] = {}
    for stage, manifest in new.items():
        earlier[manifest_key(manifest)] = store.get(manifest_key(first[stage]))
        for file, before in zip(manifest.files, first[stage].files, strict=True):
            earlier[file.key] = store.get(before.key)
    put_run(store, OLD_RUN, *old.values(), started="2026-11-20T06:00:00Z")
    put_run(store, RUN, *(new[stage] for stage in EARLY), status="running", ended=None)
    earlier[f"runs/{RUN}.json"] = store.get(f"runs/{RUN}.json")
    put_run(store, RUN, *new.values())
    point(store, "best", OLD_RUN)
    point(store, "main", OLD_RUN)
    earlier["refs/main.json"] = store.get("refs/main.json")
    point(store, "main", RUN)
    return World(
        directory=directory / "store",
        old=old,
        new=new,
        contents=contents,
        earlier=earlier,
    )


def manifest_key(manifest: Manifest) -> str:
    """Where an artifact's manifest is."""
    return f"{manifest.stage}/{manifest.fingerprint}/manifest.json"


def _bytes_of(name: str, generator: random.Random) -> bytes:
    """Some content; text where the name promises text."""
    size = generator.randrange(200, 6000)
    if name.endswith((".json", ".jsonl", ".md", ".html")):
        return bytes(generator.choice(b'{}[]"abc 0123\n') for _ in range(size // 4))
    return generator.randbytes(size)


class Noisy(LocalStore):
    """Hands out other bytes than there are, the first few times."""

    def __init__(self, directory: Path, key: str, wrong: bytes | None, times: int) -> None:
        super().__init__(directory)
        self._key, self._wrong, self._left = key, wrong, times

    def get_stored(self, key: str) -> VersionedObject:
        stored = super().get_stored(key)
        data = self._pass_on(key, stored.data)
        return VersionedObject(data=data, version=stored.version, age=stored.age)

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        super().fetch(key, path, size=size, on_bytes=on_bytes)
        data = self._pass_on(key, path.read_bytes())
        path.unlink()
        path.write_bytes(data)

    def _pass_on(self, key: str, data: bytes) -> bytes:
        if key != self._key or not self._left:
            return data
        self._left -= 1
        if self._wrong is None:
            raise ObjectNotFound(key)
        return self._wrong


class Damages:
    """Trials on one world, which is whole again after each."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        places: Sequence[str] = PLACES,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self.outcomes = Counter[str]()  # by "place kind: outcome"
        self.faults: list[str] = []
        self._places, self._kinds = places, kinds
        self._generator = random.Random(seed)
        self._world = make_world(directory, seed=seed)
        self._keys = [entry.key for entry in self._world.store.list("")]
        self._fresh = directory / "fresh"
        self._cache = directory / "cache"
        with Cache(self._cache, LIMIT) as cache:
            for item in self._world.new.values():
                fetch(self._world.store, item, cache)

    def run(self, trials: int) -> None:
        """Damage, look, mend; again and again."""
        for _ in range(trials):
            place = self._generator.choice(self._places)
            kind = self._generator.choice(self._kinds)
            item = self._world.new[self._generator.choice(list(self._world.new))]
            (self._damage_copy if place in COPIES else self._damage_object)(place, kind, item)

    def summary(self) -> str:
        """Return how often each outcome was, in a line."""
        ends = Counter[str]()
        for what, count in self.outcomes.items():
            ends[what.rpartition(": ")[2]] += count
        each = ", ".join(f"{count:,} times {what}" for what, count in ends.most_common())
        return f"{ends.total():,} damages: {each}; {len(self.faults)} faults"

    def _damage_object(self, place: str, kind: str, item: Manifest) -> None:
        """In the store or on the way from it."""
        what = place if place in OBJECTS else self._generator.choice(OBJECTS)
        key = self._object_of(what, item)
        path = self._world.path(key)
        whole = path.read_bytes()
        damaged = self._damaged(kind, key, whole)
        if damaged == whole:
            return
        if key in self._world.earlier and damaged == self._world.earlier[key]:
            kind = "stale"  # it was swapped with just that
        world, run = self._world, self._generator.choice(("tiny", "main", RUN))
        older: Sequence[Contents] = ()  # the same bytes may be one of these
        match what, kind:
            case ("manifest", "delete") | ("run", "delete" | "stale") if run == "tiny":
                # The run before made one too; a name stands for the newest finished run.
                older = [world.truth(world.old[item.stage])]
            case "tag", _:
                run = "main"
                older = [world.truth(world.old[item.stage])] if kind == "stale" else ()
            case _:
                pass
        named = {key}
        if kind in ("delete", "stale"):
            named |= {f"there is no {item.stage}@{run}", RUN}
        store = self._world.store
        if place in WAYS:
            store = Noisy(self._world.directory, key, damaged, WAYS[place])
        else:
            _write(path, damaged)
        try:
            self._look(f"{place} {kind}", f"{item.stage}@{run}", item, store, named, older)
        finally:
            _write(path, whole)
            shutil.rmtree(self._fresh, ignore_errors=True)

    def _object_of(self, place: str, item: Manifest) -> str:
        """The key of an object to damage."""
        match place:
            case "file":
                return self._generator.choice(item.files).key
            case "log":
                return self._generator.choice(item.logs).key
            case "manifest":
                return manifest_key(item)
            case "run":
                return f"runs/{RUN}.json"
            case _:
                return "refs/main.json"

    def _look(
        self,
        what: str,
        name: str,
        item: Manifest,
        store: LocalStore,
        named: set[str],
        older: Sequence[Contents] = (),
        *,
        cache: Path | None = None,
    ) -> None:
        """Fetch what a name stands for; compare it with what it truly is, or was in `older` states.

        An error must contain one of `named`.
        """
        try:
            found = _fetched(store, name, cache or self._fresh)
        except NanochatError as error:
            text = f"{error} {error.hint}"
            outcome = NAMED if any(each in text for each in named) else f"names nothing: {text}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            outcome = f"{type(error).__name__}: {error}"
        else:
            is_right = found == self._world.truth(item)
            outcome = RIGHT if is_right else OLDER if found in older else WRONG
        self.outcomes[f"{what}: {outcome}"] += 1
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
        store, name = self._world.store, f"{item.stage}@tiny"
        self._look(f"{place} {kind}", name, item, store, set(), cache=self._cache)
        if not path.exists() or path.read_bytes() != whole:
            self.faults.append(f"{place} {kind} of {name}: {path.name} was not mended")
            _write(path, whole)

    def _damaged(self, kind: str, key: str, whole: bytes) -> bytes | None:
        """What an object holds after damage; None: it is gone."""
        generator = self._generator
        if kind == "delete":
            return None
        if kind == "stale" and key in self._world.earlier:
            return self._world.earlier[key]
        if kind == "truncate" and whole:
            return whole[: generator.randrange(len(whole))]
        if kind == "extend":
            return whole + generator.randbytes(generator.randrange(1, 64))
        if kind == "swap":
            return self._world.path(generator.choice(self._others(key))).read_bytes()
        if not whole:
            return b"\0"
        place = generator.randrange(len(whole))
        flipped = whole[place] ^ (1 << generator.randrange(8))
        return whole[:place] + bytes([flipped]) + whole[place + 1 :]

    def _others(self, key: str) -> list[str]:
        """Objects to change places with: mostly of the same kind, which is harder to find."""
        others = [other for other in self._keys if other != key]
        alike = [other for other in others if other.rpartition("/")[2] == key.rpartition("/")[2]]
        near = [other for other in others if other.partition("/")[0] == key.partition("/")[0]]
        return self._generator.choice([alike, near, others]) or near


def _fetched(store: LocalStore, name: str, cache: Path) -> Contents:
    """An artifact's files, as a stage would read them."""
    item = open_artifact(store, name)
    with Cache(cache, LIMIT) as local:
        files = fetch(store, item, local) / "files"
        return {
            path.relative_to(files).as_posix(): path.read_bytes()
            for path in files.rglob("*")
            if path.is_file()
        }


def _write(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def check_variety(outcomes: Counter[str]) -> None:
    """Every place was damaged in every way, and every answer was given."""
    seen = {what.partition(":")[0] for what in outcomes}
    assert seen == {f"{place} {kind}" for place in PLACES for kind in KINDS}
    assert {what.rpartition(": ")[2] for what in outcomes} == {NAMED, RIGHT, OLDER}
