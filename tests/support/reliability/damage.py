"""Damaged objects, thousands of them: each is found before it is used, and no wrong byte comes out.

One object is damaged in each trial: in the store, on the way from it, or in the cache. Then the
artifact it belongs to is opened by name and fetched. It must come out right, or not at all with an
error that names what is damaged. Where nothing can be told from the bytes, because they are an
older, whole state of a record, that older state must come out, and nothing in between.
"""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import open_artifact
from flows.identity.manifest import Manifest
from infra.retry import TRIES
from infra.storage.base import ObjectNotFound, OnBytes, VersionedObject, ignore_bytes
from infra.storage.local import LocalStore
from nanochat_core.errors import NanochatError
from tests.support.reliability.damage_world import RUN, Contents, make_world, manifest_key

LIMIT = 10**12
KINDS = ("flip", "truncate", "extend", "swap", "stale", "delete")
RECORDS = ("manifest", "run", "tag")
OBJECTS = ("file", "log", *RECORDS)  # in the store
COPIES = ("cached file", "cached manifest")
WAYS = {"answered wrongly at first": TRIES - 1, "answered wrongly always": 10**9}
PLACES = (*OBJECTS, *COPIES, *WAYS)


@dataclass
class Report:
    """What became of the trials."""

    outcomes: Counter[str] = field(default_factory=Counter[str])  # "place kind: outcome"
    wrong: list[str] = field(default_factory=list[str])  # wrong bytes came out
    unnamed: list[str] = field(default_factory=list[str])  # an error that names nothing
    crashes: list[str] = field(default_factory=list[str])  # another exception than ours

    def add(self, what: str, outcome: str) -> None:
        """Count one trial."""
        self.outcomes[f"{what}: {outcome}"] += 1

    @property
    def trials(self) -> int:
        """How many there were."""
        return sum(self.outcomes.values())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One damage and what may come of it."""

    key: str  # of the object
    name: str  # that the artifact is opened by
    right: Contents  # what it truly holds
    older: tuple[Contents, ...] = ()  # states that the bytes cannot be told from
    named: frozenset[str] = frozenset()  # what an error must speak of, one of them


class Noisy(LocalStore):
    """Hands out other bytes than there are, the first few times."""

    def __init__(self, directory: Path, key: str, wrong: bytes | None, times: int) -> None:
        super().__init__(directory)
        self._key, self._wrong, self._left = key, wrong, times

    def get(self, key: str, *, size: int | None = None) -> bytes:
        return self._pass_on(key, super().get(key, size=size))

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
        self.report = Report()
        self._places, self._kinds = places, kinds
        self._generator = random.Random(seed)
        self._world = make_world(directory, seed=seed)
        self._keys = [entry.key for entry in self._world.store.list("")]
        self._fresh = directory / "fresh"
        self._cache = directory / "cache"
        with Cache(self._cache, LIMIT) as cache:
            for item in self._world.new.values():
                fetch(self._world.store, item, cache)

    def run(self, trials: int) -> Report:
        """Damage, look, mend; again and again."""
        for number in range(trials):
            self._run_one(number)
        return self.report

    def _run_one(self, number: int) -> None:
        place = self._generator.choice(self._places)
        kind = self._generator.choice(self._kinds)
        stage = self._generator.choice(list(self._world.new))
        item = self._world.new[stage]
        if place in COPIES:
            self._damage_copy(number, place, kind, item)
        else:
            self._damage_object(number, place, kind, item)

    def _damage_object(self, number: int, place: str, kind: str, item: Manifest) -> None:
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
        trial = self._trial(what, kind, key, item)
        store = self._world.store
        if place in WAYS:
            store = Noisy(self._world.directory, key, damaged, WAYS[place])
        else:
            _write(path, damaged)
        try:
            self._look(number, f"{place} {kind}", trial, store, self._fresh)
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

    def _trial(self, place: str, kind: str, key: str, item: Manifest) -> Trial:
        """What may come of this damage: the right bytes, an error, or a state that was true."""
        world, stage = self._world, item.stage
        right, before = world.truth(item), world.truth(world.old[stage])
        run = "main" if place == "tag" else self._generator.choice(("tiny", "main", RUN))
        older: tuple[Contents, ...] = ()
        match place, kind:
            case ("manifest", "delete") | ("run", "delete") if run == "tiny":
                older = (before,)  # the run before it made one too
            case "run", "stale" if run == "tiny":
                older = (before,)  # it had not finished, and a name stands for finished runs
            case "tag", "stale":
                older = (before,)
            case _:
                pass
        named = {key}
        if kind in ("delete", "stale"):
            named |= {f"there is no {stage}@{run}", RUN}
        return Trial(
            key=key, name=f"{stage}@{run}", right=right, older=older, named=frozenset(named)
        )

    def _look(self, number: int, what: str, trial: Trial, store: LocalStore, cache: Path) -> None:
        """Open and fetch what the trial is about, and referee what comes out."""
        label = f"trial {number}: {what} of {trial.key}"
        try:
            found = _fetched(store, trial.name, cache)
        except NanochatError as error:
            text = f"{error} {error.hint}"
            if not any(name in text for name in trial.named):
                self.report.unnamed.append(f"{label}: {text}")
            self.report.add(what, "an error that names it")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.report.crashes.append(f"{label}: {type(error).__name__}: {error}")
            self.report.add(what, "a crash")
            return
        if found == trial.right:
            self.report.add(what, "the right bytes")
        elif found in trial.older:
            self.report.add(what, "an older state, whole")
        else:
            self.report.wrong.append(label)
            self.report.add(what, "WRONG")

    def _damage_copy(self, number: int, place: str, kind: str, item: Manifest) -> None:
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
        trial = Trial(key=file.key, name=f"{item.stage}@tiny", right=self._world.truth(item))
        self._look(number, f"{place} {kind}", trial, self._world.store, self._cache)
        if not path.exists() or path.read_bytes() != whole:
            self.report.wrong.append(f"trial {number}: {path.name} was not mended")
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


def summary(report: Report) -> str:
    """Return the report in a line."""
    by_outcome: Counter[str] = Counter()
    for what, count in report.outcomes.items():
        by_outcome[what.rpartition(": ")[2]] += count
    ends = ", ".join(f"{count:,} times {what}" for what, count in by_outcome.most_common())
    return (
        f"{report.trials:,} damages: {ends}; {len(report.wrong)} wrong, "
        f"{len(report.crashes)} crashes, {len(report.unnamed)} errors that name nothing"
    )


def check(report: Report) -> None:
    """Everything was found, and said."""
    assert report.wrong == []
    assert report.crashes == []
    assert report.unnamed == []


def check_variety(report: Report) -> None:
    """Every place was damaged in every way, and every answer was given."""
    seen = {what.partition(":")[0] for what in report.outcomes}
    assert seen == {f"{place} {kind}" for place in PLACES for kind in KINDS}
    outcomes = {what.rpartition(": ")[2] for what in report.outcomes}
    assert outcomes == {"an error that names it", "the right bytes", "an older state, whole"}
