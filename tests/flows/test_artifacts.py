"""Publishing and fetching: whole or absent, first one wins, every damaged byte found before use."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.artifacts import Published, fetch, find_manifest, newest_manifests, publish, supersede
from flows.fingerprint import Identity, fingerprint_of
from flows.manifest import Manifest, Provenance
from infra.storage.base import Missing
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StageError, StoreError

PROVENANCE = Provenance(
    run="tiny-1",
    owner="o",
    epoch=1,
    created="2026-11-21T05:53:38Z",
    git_commit=None,
    metrics={"n": 1},
    segments=(),
)


def identity_of(stage: str, **config: object) -> Identity:
    preimage = {"stage": stage, "format": 1, "config": config, "inputs": {}, "code": {}}
    return Identity(stage=stage, fingerprint=fingerprint_of(preimage), preimage=preimage)  # type: ignore[arg-type]


ROWS = identity_of("rows", seed=1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def write_output(tmp_path: Path, *, train: bytes = b"123456") -> Path:
    """A job's directory with three files and its events; returns output/."""
    output = tmp_path / "work" / "output"
    (output / "sub").mkdir(parents=True, exist_ok=True)
    (output / "train.rows").write_bytes(train)
    (output / "rows.json").write_text("{}")
    (output / "sub" / "empty.bin").write_bytes(b"")
    (output.parent / "events.jsonl").write_text('{"kind": "start"}\n')
    return output


def no_fence() -> None:
    """Nobody else may publish meanwhile."""


def publish_rows(
    store: LocalStore,
    tmp_path: Path,
    *,
    train: bytes = b"123456",
    identity: Identity = ROWS,
    fence: Callable[[], None] = no_fence,
) -> Published:
    output = write_output(tmp_path, train=train)
    return publish(
        store,
        identity,
        output,
        logs=[output.parent / "events.jsonl"],
        inputs={},
        provenance=PROVENANCE,
        fence=fence,
    )


def test_there_is_no_artifact_before_it_is_published(store: LocalStore):
    assert find_manifest(store, "rows", ROWS.fingerprint) is None


def test_what_was_published_is_found_and_fetched(store: LocalStore, tmp_path: Path):
    published = publish_rows(store, tmp_path)
    assert not published.adopted
    manifest = find_manifest(store, "rows", ROWS.fingerprint)
    assert manifest == published.manifest
    assert [file.path for file in manifest.files] == ["rows.json", "sub/empty.bin", "train.rows"]
    directory = fetch(store, manifest, tmp_path / "cache")
    assert (directory / "files" / "train.rows").read_bytes() == b"123456"
    assert (directory / "files" / "sub" / "empty.bin").read_bytes() == b""
    assert (directory / "logs" / "events.jsonl").read_text() == '{"kind": "start"}\n'
    assert Manifest.from_json((directory / "manifest.json").read_bytes(), where="") == manifest


def test_a_store_that_cannot_be_reached_is_not_an_absent_artifact(tmp_path: Path):
    with pytest.raises(StoreError):
        find_manifest(LocalStore(tmp_path / "gone" / "store"), "rows", ROWS.fingerprint)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format": 1, "stage": "rows"'])
def test_a_damaged_manifest_is_not_an_absent_artifact(store: LocalStore, data: bytes):
    store.put(f"rows/{ROWS.fingerprint}/manifest.json", data)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        find_manifest(store, "rows", ROWS.fingerprint)


def test_a_manifest_under_another_name_is_refused(store: LocalStore, tmp_path: Path):
    publish_rows(store, tmp_path)
    data = store.get(f"rows/{ROWS.fingerprint}/manifest.json")
    store.put(f"rows/{'0' * 64}/manifest.json", data)
    with pytest.raises(ArtifactError, match="is the manifest of rows/"):
        find_manifest(store, "rows", "0" * 64)


def test_whoever_comes_second_adopts_the_first(store: LocalStore, tmp_path: Path):
    first = publish_rows(store, tmp_path)
    second = publish_rows(store, tmp_path)
    assert second == Published(manifest=first.manifest, adopted=True, divergence=None)


def test_a_second_one_with_other_contents_is_adopted_and_recorded(
    store: LocalStore, tmp_path: Path
):
    first = publish_rows(store, tmp_path)
    second = publish_rows(store, tmp_path, train=b"other!")
    assert second.adopted
    assert second.manifest == first.manifest
    assert second.divergence is not None
    recorded = Manifest.from_json(store.get(second.divergence), where="")
    assert recorded.digest != first.manifest.digest
    directory = fetch(store, recorded, tmp_path / "cache")  # its bytes are there to be compared
    assert (directory / "files" / "train.rows").read_bytes() == b"other!"


PUBLISHER = """
import sys
from pathlib import Path
from flows.artifacts import publish
from flows.fingerprint import Identity, fingerprint_of
from flows.manifest import Provenance
from infra.storage.local import LocalStore

work, me = Path(sys.argv[1]), sys.argv[2]
output = work / me
output.mkdir()
(output / "rows.json").write_text(me)
(output / "train.rows").write_text(me * 50_000)
provenance = Provenance(
    run=me,
    owner="o",
    epoch=1,
    created="2026-11-21T05:53:38Z",
    git_commit=None,
    metrics={},
    segments=(),
)
print("ready", flush=True)
sys.stdin.readline()
for seed in range(20):
    preimage = {"stage": "rows", "format": 1, "config": {"seed": seed}, "inputs": {}, "code": {}}
    identity = Identity(stage="rows", fingerprint=fingerprint_of(preimage), preimage=preimage)
    result = publish(
        LocalStore(work / "store"),
        identity,
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        fence=lambda: None,
    )
    print(result.manifest.provenance.run, result.divergence is not None)
"""


def test_two_processes_that_publish_at_once_agree_on_one_whole_artifact(
    store: LocalStore, tmp_path: Path
):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0].splitlines() for racer in racers]
    for seed, (a, b) in enumerate(zip(*answers, strict=True)):
        assert a.split()[0] == b.split()[0]
        assert sorted([a.split()[1], b.split()[1]]) == ["False", "True"]
        identity = identity_of("rows", seed=seed)
        manifest = find_manifest(store, "rows", identity.fingerprint)
        assert manifest is not None
        directory = fetch(store, manifest, tmp_path / "cache")
        assert {(directory / "files" / "rows.json").read_text()} == {a.split()[0]}
        assert (directory / "files" / "train.rows").read_text() == a.split()[0] * 50_000


def test_a_killed_attempt_leaves_no_artifact(store: LocalStore, tmp_path: Path):
    class Killed(Exception):
        pass

    class Dying(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            raise Killed

    with pytest.raises(Killed):
        publish_rows(Dying(tmp_path / "store"), tmp_path)
    assert find_manifest(store, "rows", ROWS.fingerprint) is None
    assert not publish_rows(store, tmp_path).adopted


def test_an_attempt_that_lost_its_right_publishes_nothing(store: LocalStore, tmp_path: Path):
    key = f"rows/{ROWS.fingerprint}/manifest.json"

    def fence() -> None:
        assert list(store.list(f"rows/{ROWS.fingerprint}/files/")), "the files go first"
        raise StageError("somebody else builds it")

    with pytest.raises(StageError):
        publish_rows(store, tmp_path, fence=fence)
    with pytest.raises(Missing):
        store.get(key)
    assert not list(store.list("index/"))


def test_progress_of_publishing_adds_up_to_all_bytes(store: LocalStore, tmp_path: Path):
    output = write_output(tmp_path)
    told: list[int] = []
    publish(
        store,
        ROWS,
        output,
        logs=[output.parent / "events.jsonl"],
        inputs={},
        provenance=PROVENANCE,
        fence=no_fence,
        on_bytes=told.append,
    )
    assert sum(told) == len(b"123456") + len("{}") + len('{"kind": "start"}\n')


def test_a_writer_whose_answer_was_lost_has_won(tmp_path: Path):
    class Forgetful(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            super().put_if_absent(key, data)
            return super().put_if_absent(key, data)

    published = publish_rows(Forgetful(tmp_path / "store"), tmp_path)
    assert not published.adopted
    assert published.divergence is None


def test_a_superseded_artifact_makes_room_and_is_remembered_if_it_differed(
    store: LocalStore, tmp_path: Path
):
    old = publish_rows(store, tmp_path).manifest
    supersede(store, "rows", ROWS.fingerprint)
    supersede(store, "rows", ROWS.fingerprint)
    assert find_manifest(store, "rows", ROWS.fingerprint) is None
    new = publish_rows(store, tmp_path, train=b"other!").manifest
    (key,) = new.divergences
    assert Manifest.from_json(store.get(key), where="") == old
    assert fetch(store, old, tmp_path / "cache") != fetch(store, new, tmp_path / "cache")


def test_built_again_with_the_same_bytes_is_no_divergence(store: LocalStore, tmp_path: Path):
    old = publish_rows(store, tmp_path).manifest
    supersede(store, "rows", ROWS.fingerprint)
    new = publish_rows(store, tmp_path).manifest
    assert new.digest == old.digest
    assert new.divergences == ()


def test_a_stage_that_left_nothing_publishes_nothing(store: LocalStore, tmp_path: Path):
    (tmp_path / "output").mkdir()
    with pytest.raises(ArtifactError, match="left no files"):
        publish(
            store,
            ROWS,
            tmp_path / "output",
            logs=[],
            inputs={},
            provenance=PROVENANCE,
            fence=no_fence,
        )


def test_an_output_that_is_no_plain_file_or_no_plain_name_is_refused(
    store: LocalStore, tmp_path: Path
):
    output = write_output(tmp_path)
    (output / "link").symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match="not a plain file"):
        publish(store, ROWS, output, logs=[], inputs={}, provenance=PROVENANCE, fence=no_fence)
    (output / "link").unlink()
    (output / "with space").write_text("")
    with pytest.raises(StoreError, match="with space"):
        publish(store, ROWS, output, logs=[], inputs={}, provenance=PROVENANCE, fence=no_fence)
    assert find_manifest(store, "rows", ROWS.fingerprint) is None


def test_old_artifacts_are_listed_newest_first(store: LocalStore, tmp_path: Path):
    for day in (3, 1, 2):
        output = write_output(tmp_path)
        provenance = dataclasses.replace(PROVENANCE, created=f"2026-11-0{day}T00:00:00Z")
        identity = identity_of("rows", seed=day)
        publish(store, identity, output, logs=[], inputs={}, provenance=provenance, fence=no_fence)
    seeds = [m.preimage["config"] for m in newest_manifests(store, "rows", 2)]
    assert seeds == [{"seed": 3}, {"seed": 2}]
    assert list(newest_manifests(store, "pretrain", 2)) == []
    store.put(f"rows/{identity_of('rows', seed=3).fingerprint}/manifest.json", b"damaged")
    seeds = [m.preimage["config"] for m in newest_manifests(store, "rows", 2)]
    assert seeds == [{"seed": 2}, {"seed": 1}]


# Damage in the store.


def damage(path: Path, kind: str, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "bit":
        place = generator.randrange(len(data))
        data[place] ^= 1 << generator.randrange(8)
    elif kind == "truncated":
        del data[generator.randrange(len(data)) :]
    elif kind == "longer":
        data += b"\0"
    path.chmod(0o644)
    path.unlink() if kind == "gone" else path.write_bytes(data)


@pytest.mark.parametrize("kind", ["bit", "truncated", "longer", "gone"])
@pytest.mark.parametrize("group", ["files", "logs"])
def test_damage_in_the_store_is_found_and_named(
    store: LocalStore, tmp_path: Path, kind: str, group: str
):
    manifest = publish_rows(store, tmp_path).manifest
    generator = random.Random(7)
    for file in getattr(manifest, group):
        path = tmp_path / "store" / file.key
        whole = path.read_bytes()
        if not whole and kind in ("bit", "truncated"):
            continue
        damage(path, kind, generator)
        with pytest.raises(ArtifactError, match=file.path) as caught:
            fetch(store, manifest, tmp_path / "cache")
        assert manifest.name in str(caught.value)
        assert "--force rows" in (caught.value.hint or "")
        store.put(file.key, whole)
    assert not list((tmp_path / "cache" / "rows").glob("*/manifest.json"))
    fetch(store, manifest, tmp_path / "cache")


def test_two_objects_that_changed_places_are_found(store: LocalStore, tmp_path: Path):
    manifest = publish_rows(store, tmp_path, train=b"{]").manifest
    paths = [tmp_path / "store" / file.key for file in manifest.files if file.size == 2]
    first, second = (path.read_bytes() for path in paths)
    store.put(manifest.files[0].key, second)
    store.put(manifest.files[2].key, first)
    with pytest.raises(ArtifactError, match="has sha256"):
        fetch(store, manifest, tmp_path / "cache")


# Damage in the cache.


@pytest.mark.parametrize("kind", ["bit", "truncated", "longer", "gone"])
@pytest.mark.parametrize("name", ["files/train.rows", "logs/events.jsonl", "manifest.json"])
def test_a_damaged_cached_copy_is_fetched_again(
    store: LocalStore, tmp_path: Path, kind: str, name: str
):
    manifest = publish_rows(store, tmp_path).manifest
    directory = fetch(store, manifest, tmp_path / "cache")
    whole = (directory / name).read_bytes()
    data = bytearray(whole)
    replacement = tmp_path / "replacement"  # a copy: the cached file may share the store's bytes
    replacement.write_bytes(bytes(data))
    damage(replacement, kind, random.Random(3))
    (directory / name).unlink()
    if replacement.exists():
        replacement.replace(directory / name)
    assert fetch(store, manifest, tmp_path / "cache") == directory
    assert (directory / name).read_bytes() == whole


@pytest.mark.parametrize("intruder", ["files/extra", "files/sub/extra", "logs/link"])
def test_a_cached_copy_with_something_more_is_fetched_again(
    store: LocalStore, tmp_path: Path, intruder: str
):
    manifest = publish_rows(store, tmp_path).manifest
    directory = fetch(store, manifest, tmp_path / "cache")
    if intruder.endswith("link"):
        (directory / intruder).symlink_to("/etc/passwd")
    else:
        (directory / intruder).write_text("")
    fetch(store, manifest, tmp_path / "cache")
    assert not (directory / intruder).is_symlink()
    assert not (directory / intruder).exists()


def test_a_whole_cached_copy_needs_no_store(store: LocalStore, tmp_path: Path):
    manifest = publish_rows(store, tmp_path).manifest
    directory = fetch(store, manifest, tmp_path / "cache")
    for file in manifest.files:
        store.delete(file.key)
    assert fetch(store, manifest, tmp_path / "cache") == directory


def test_a_fetch_that_was_killed_is_cleaned_up(store: LocalStore, tmp_path: Path):
    manifest = publish_rows(store, tmp_path).manifest
    directory = fetch(store, manifest, tmp_path / "cache")
    directory.rename(directory.with_name(f".{directory.name}.new"))
    (directory.with_name(f".{directory.name}.new") / "files" / "left").write_text("")
    fetch(store, manifest, tmp_path / "cache")
    assert sorted(path.name for path in directory.parent.iterdir()) == [
        directory.name,
        f"{directory.name}.lock",
    ]
    assert not (directory / "files" / "left").exists()


def test_a_fetched_file_is_not_the_stores_own_to_write(store: LocalStore, tmp_path: Path):
    manifest = publish_rows(store, tmp_path).manifest
    path = fetch(store, manifest, tmp_path / "cache") / "files" / "train.rows"
    if os.geteuid() == 0:  # nothing stops root from writing, so root's copy is its own
        path.write_bytes(b"scribble")
        stored = next(file for file in manifest.files if file.path == "train.rows")
        assert store.get(stored.key) == b"123456"
    else:
        with pytest.raises(PermissionError):
            path.write_bytes(b"scribble")


def test_a_manifest_that_points_at_a_missing_object_says_which(store: LocalStore, tmp_path: Path):
    manifest = publish_rows(store, tmp_path).manifest
    store.delete(manifest.files[0].key)
    with pytest.raises(Missing):
        store.get(manifest.files[0].key)
    with pytest.raises(ArtifactError, match=r"rows\.json of rows/.* is gone"):
        fetch(store, manifest, tmp_path / "cache")


def test_a_manifest_in_the_store_is_for_people_too(store: LocalStore, tmp_path: Path):
    publish_rows(store, tmp_path)
    tree = json.loads(store.get(f"rows/{ROWS.fingerprint}/manifest.json"))
    assert tree["format"] == 2
    assert tree["preimage"]["config"] == {"seed": 1}
    assert tree["provenance"]["metrics"] == {"n": 1}
