"""What is garbage, what is not, and when it goes; test_gc_histories.py has the rest."""

import pytest

from flows.artifacts.names import open_artifact
from flows.artifacts.pins import PINS, pin
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point, runs_called
from flows.gc.collect import MARK
from flows.identity.records import encode_record
from flows.identity.redo import RedoCounter, raise_redo
from flows.leases import held_lease, lease
from nanochat_core.errors import ArtifactError
from tests.support.flows.rubbish import acquire, gc, gc_until_clean, look, make, make_other, mark
from tests.support.flows.shelf import ACCEPTED, make_manifest, put_run
from tests.support.reliability.memory_store import DAY, HOUR, MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_what_nothing_refers_to_is_marked_first_and_deleted_after_the_grace(store):
    make(store)
    store.now += 2 * DAY
    first = gc(store)
    assert store.deleted == []
    assert first.due == pytest.approx(store.now + DAY)
    store.now += DAY - HOUR
    assert gc(store).swept.objects == 0
    store.now += HOUR
    assert gc(store).swept.objects == 4  # the manifest, a file, a log, an index entry
    assert not store.names("rows/") - {key for key in store.names() if key.endswith("lease.json")}
    assert not store.names("index/")


def test_an_old_run_is_forgotten_with_what_only_it_reaches(store):
    shared, own = make(store, seed=1), make(store, "sft", seed=2)
    put_run(store, "tiny-1", shared, own, status="failed")
    store.now += 31 * DAY
    put_run(store, "tiny-2", shared)
    gc_until_clean(store)
    assert store.names("runs/") == {"runs/tiny-2.json"}
    assert [name.rpartition("-tiny-")[2] for name in store.names("names/")] == ["2"]
    assert shared.ref.manifest_key in store.names()
    assert not store.names(f"{own.ref.prefix}/") - {own.ref.lease_key}


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "of an earlier version"])
def test_the_newest_finished_run_of_each_name_stays_however_old(store, is_named):
    old, new, other = (make(store, seed=seed) for seed in range(3))
    put_run(store, "tiny-1", old, started="2026-01-01T00:00:00Z")
    put_run(store, "tiny-2", new, started="2026-01-02T00:00:00Z")
    put_run(store, "tiny-3", old, started="2026-01-03T00:00:00Z", status="interrupted")
    put_run(store, "d12-1", other, name="d12")
    for key in () if is_named else store.names("names/"):
        store.delete(key)
    store.now += 300 * DAY
    gc_until_clean(store)
    assert store.names("runs/") == {"runs/tiny-2.json", "runs/d12-1.json"}
    manifests = {key for key in store.names() if key.endswith("manifest.json")}
    assert manifests == {new.ref.manifest_key, other.ref.manifest_key}


def test_the_run_that_a_name_stands_for_stays_though_its_id_has_no_time(store):
    put_run(store, "tiny-19700101t000000z-1a2b", make(store), started="2026-01-02T00:00:00Z")
    put_run(store, "slurm-17", make(store, seed=1), started="2026-01-01T00:00:00Z")
    named = next(runs_called(store, "tiny")).run
    store.now += 300 * DAY
    gc_until_clean(store)
    assert store.names("runs/") == {f"runs/{named}.json"}


def test_what_a_later_run_of_the_name_did_not_make_stays(store):
    pretrain, sft, older = make(store, "pretrain"), make(store, "sft"), make(store, "sft", seed=1)
    put_run(store, "tiny-1", pretrain, older)
    put_run(store, "tiny-2", pretrain, sft)
    put_run(store, "tiny-3", pretrain)  # of a miniseries, say
    store.now += 300 * DAY
    gc_until_clean(store)
    assert open_artifact(store, "sft@tiny") == sft
    assert store.names("runs/") == {"runs/tiny-2.json", "runs/tiny-3.json"}


def test_a_run_that_holds_a_lease_stays_however_old(store):
    source = make(store)
    put_run(store, "tiny-1", source, status="running")
    store.now += 300 * DAY
    acquire(store, make_manifest("sft"), run="tiny-1")
    assert "runs/tiny-1.json" not in look(store).garbage
    assert not any(source.ref.prefix in name for name in look(store).garbage)
    store.now += lease.TTL + 1
    assert "runs/tiny-1.json" in look(store).garbage


def test_nothing_under_a_live_lease_is_garbage(store):
    manifest = make(store)
    store.put(f"{manifest.ref.prefix}/files/upload/data", b"half")
    store.now += 40 * DAY
    held = acquire(store, manifest)
    assert look(store).garbage == {}
    held.release()
    assert f"{manifest.ref.prefix}/files/upload/" in (garbage := look(store).garbage)
    assert manifest.ref.lease_key not in garbage  # the next lease has the number after its own


def test_a_manifest_that_came_too_late_stays_with_the_artifact_and_its_files_go(store):
    manifest = make(store)
    put_run(store, "tiny-1", manifest)
    aside = f"{manifest.ref.prefix}/divergences/other.json"
    other = make_other(manifest)
    store.now += 5 * DAY
    store.put(other.files[0].key, b"other")
    store.put(aside, other.to_json())
    store.now += DAY - HOUR
    assert set(look(store).garbage) == {f"{manifest.ref.prefix}/files/b/"}
    gc_until_clean(store)
    assert other.files[0].key not in store.names()
    assert {aside, manifest.files[0].key} <= store.names()
    store.delete("runs/tiny-1.json")
    gc_until_clean(store)
    assert aside not in store.names()


def test_checkpoints_go_when_the_stage_has_an_artifact(store):
    manifest = make(store)
    put_run(store, "tiny-1", manifest)
    root = f"{manifest.ref.prefix}/checkpoints/step-0000010"
    store.put(f"{root}/0-1/model", b"x")
    store.put(f"{root}/COMMIT.json", b"x")
    store.now += HOUR
    gc_until_clean(store)
    assert store.deleted == [f"{root}/COMMIT.json", f"{root}/0-1/model"]


def test_a_redo_counter_stays_for_ever(store):
    """Without it plans would find the first artifact of the recipe again."""
    old = make(store)
    raise_redo(store, old.ref, RedoCounter(), RedoCounter(number=1, runs=("tiny-2",)))
    store.now += 400 * DAY
    gc_until_clean(store)
    gc_until_clean(store)
    assert store.names(f"{old.ref.prefix}/") - {old.ref.lease_key} == {old.ref.redo_key}
    assert look(store).inventory.unknown == 0


def test_checkpoints_of_unfinished_work_stay_as_long_as_a_run_does(store):
    root = f"{make_manifest('pretrain').ref.checkpoints_prefix}/"
    store.put(f"{root}step-0000010/o-1/model", b"x")
    store.put(f"{root}step-0000010/COMMIT.json", b"x")
    store.now += 29 * DAY
    assert look(store).garbage == {}
    store.now += 2 * DAY
    gc_until_clean(store)
    assert not store.names(root)


def test_a_revocation_of_what_is_elsewhere_stays_while_something_made_from_it_is_here(store):
    away = make_manifest("tokenizer")
    model = make(store, "sft", inputs={"tokenizer": away})
    put_run(store, "tiny-1", model)
    revoke(store, away, why="wrong data", who="me", when="now")
    store.now += 40 * DAY
    gc_until_clean(store)
    assert away.ref.revocation_key in store.names()
    store.delete("runs/tiny-1.json")
    gc_until_clean(store)
    assert away.ref.revocation_key not in store.names()


def test_a_revocation_goes_with_its_artifact_and_stays_while_its_bytes_are_in_use(store):
    wrong = make(store, seed=1)
    revoke(store, wrong, why="wrong data", who="me", when="now")
    facts = {**ACCEPTED, "from": wrong.fingerprint}
    accepted = make(store, seed=2, accepted=facts)
    put_run(store, "tiny-1", accepted, status="failed")
    store.now += 2 * DAY
    gc_until_clean(store)
    assert wrong.ref.manifest_key not in store.names()
    assert wrong.ref.revocation_key in store.names()
    store.now += 31 * DAY
    gc_until_clean(store)
    assert wrong.ref.revocation_key not in store.names()


def test_a_pin_keeps_artifacts_while_it_is_held_and_for_a_while_after_its_owner_died(store):
    manifest = make(store)
    store.put(f"{manifest.ref.prefix}/files/dead/data", b"half")
    store.now += 2 * DAY
    with pin(store, [manifest.ref], why="accept", log=print, pause=lambda seconds: None):
        (key,) = store.names(PINS)
        data = store.get(key)
        assert look(store).garbage == {}
    assert store.names(PINS) == set()
    assert len(look(store).garbage) == 5
    store.put(key, data)  # as if it had been killed
    store.now += 29 * DAY
    assert look(store).garbage == {}
    store.now += 2 * DAY
    gc_until_clean(store)
    assert store.names("gc/pins/") == set()
    assert store.names("index/") == set()


def test_half_written_objects_go_after_a_week(store):
    store.unfinished = [store.now, store.now + 6 * DAY]
    store.now += 8 * DAY
    assert gc(store).unfinished == 1


def test_keys_that_are_not_ours_are_left_alone(store):
    foreign = {"notes.txt", "rows/readme", f"rows/{'0' * 64}/extra/thing", "backup/a/b/c"}
    for key in foreign:
        store.put(key, b"x")
    store.now += 300 * DAY
    gc_until_clean(store)
    assert foreign <= store.names()
    assert look(store).inventory.unknown == len(foreign)


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: "runs/tiny-1.json",
        lambda store: "refs/main.json",
        lambda store: next(key for key in store.names("rows/") if key.endswith("manifest.json")),
        lambda store: next(key for key in store.names("rows/") if key.endswith("lease.json")),
        lambda store: next(iter(store.names(PINS))),
        lambda store: MARK,
    ],
    ids=["run", "tag", "manifest", "lease", "pin", "marks"],
)
@pytest.mark.parametrize(
    "data", [b"rotten", encode_record({"run": "x"}, format=99)], ids=["rot", "format"]
)
def test_while_a_record_cannot_be_read_nothing_is_deleted_and_it_is_named(store, damage, data):
    make(store, seed=2)
    mark(store)
    manifest = make(store)
    put_run(store, "tiny-1", manifest)
    point(store, "main", "tiny-1")
    acquire(store, manifest)
    store.put(f"{PINS}1.json", encode_record({"artifacts": [], "why": ""}, format=1))
    assert look(store).deletable
    key = damage(store)
    store.put(key, data)
    for command in (look, gc):
        with pytest.raises(ArtifactError, match=key) as caught:
            command(store)
        assert caught.value.hint
    assert store.deleted == []


def test_a_damaged_manifest_that_nothing_reaches_is_no_garbage_either(store):
    manifest = make(store)
    store.put(manifest.ref.manifest_key, b"rotten")
    store.now += 2 * DAY
    with pytest.raises(ArtifactError, match="cannot be distinguished from what is in use"):
        look(store)


def test_a_process_that_slept_while_its_files_went_has_lost_its_lease(store):
    manifest = make_manifest("rows", config={"seed": 7})
    held = acquire(store, manifest)
    for file in manifest.files:
        store.put(file.key, b"x" * file.size)
    for _ in range(3):  # no one takes the lease that expired, and the grace passes twice
        store.now += 2 * DAY
        gc(store)
    assert not list(store.list(f"{manifest.ref.prefix}/files/"))
    with pytest.raises(held_lease.LeaseLost):
        held.check()
