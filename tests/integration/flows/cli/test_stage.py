"""`nanochat stage` builds stages, in processes of their own."""

import threading

from flows.artifacts.names import open_run
from flows.artifacts.pins import SWEEP
from flows.artifacts.runs import find_run
from flows.cli.app import main
from flows.gc.collect import make_claim
from flows.identity.fingerprint import REPOSITORY, Code
from flows.leases import held_lease
from flows.profiles import open_profile
from tests.support.flows.house import build
from tests.support.flows.shelf import put_run
from tests.support.flows.waiting import wait_until
from tests.support.nanochat_core.data.hub_server import talking_to_hub
from tests.unit.flows.cli.test_stage import argv_of


def test_a_run_of_single_stages_has_finished_once_all_of_them_exist(terminal, store, tmp_path):
    before = put_run(store, "tiny-20200101t000000z-0001")
    made = build(store, tmp_path / "work", Code(REPOSITORY), run=open_profile("tiny").run)
    report = made["report"].ref.manifest_key
    record = store.get(report)
    store.delete(report)
    assert "cached  file://" in terminal.said("stage", "tiny", "shards", "--gpus", "0")[-1]
    assert open_run(store, "tiny") == before
    store.put(report, record)
    terminal.said("stage", "tiny", "shards", "--gpus", "0")
    found = open_run(store, "tiny")
    assert found.status == "finished"
    assert set(found.stages) == set(made)


def test_a_run_with_an_id_resumes_and_builds_anew_once(terminal, store, tmp_path):
    words = (*argv_of(tmp_path / "a"), "--run", "slurm-7", "--force")
    assert "built  file://" in terminal.said("stage", "tiny", "shards", *words)[-1]
    first = find_run(store, "slurm-7")
    assert "cached  file://" in terminal.said("stage", "tiny", "shards", *words)[-1]
    assert "built  file://" in terminal.said("stage", "tiny", "tokenizer", *words)[-1]
    found = find_run(store, "slurm-7")
    assert found.started == first.started
    assert set(found.stages) == {"shards", "tokenizer"}
    terminal.refuses("stage", "tiny", "shards", *words, "--depth", "2")


def test_an_input_that_is_collected_before_the_run_has_recorded_it_is_named(
    terminal, store, tmp_path, capsys
):
    words = argv_of(tmp_path / "a")
    terminal.said("stage", "tiny", "shards", *words, "--run", "first")
    first = find_run(store, "first")
    assert first is not None
    held = held_lease.try_acquire(store, SWEEP, make_claim())
    assert isinstance(held, held_lease.HeldLease)

    def collect() -> None:
        """Play a collection that has read the runs' records already, until the run has its own."""
        wait_until(lambda: find_run(store, "second"))
        store.delete(f"shards/{first.stages['shards']}/manifest.json")
        held.release()

    collection = threading.Thread(target=collect, daemon=True)
    collection.start()
    assert main(("stage", "tiny", "tokenizer", *words, "--run", "second")) == 1
    collection.join()
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: shards/{first.stages['shards'][:12]} was deleted from file://")
    assert hint == "hint: run the same command again: it looks for its artifacts again"
    ended = find_run(store, "second")
    assert ended.status == "failed"


def test_only_names_that_the_stage_itself_downloads_are_resolved_again(
    terminal, store, tmp_path, monkeypatch
):
    text, talks = "karpathy/climbmix-400b-shuffle", "HuggingFaceTB/smol-smoltalk"
    upstream = {f"{text}@main": "a" * 40, f"{talks}@main": "b" * 40}
    put_run(store, "d12-20260101t000000z-0001", name="d12", profile="d12", upstream=upstream)
    words = ("--gpus", "0", "--set", "task_data.core_bundle=null")
    with talking_to_hub(tmp_path / "hf-home", monkeypatch) as hub:
        error, _ = terminal.fails("stage", "d12", "tokenizer", *words)
        assert "tokenizer needs shards, which is not in" in error
        assert hub.requests == []
        error, _ = terminal.fails("stage", "d12", "shards", *words)
        assert f"there is no dataset {text}" in error
        assert len(hub.requests) == 1
