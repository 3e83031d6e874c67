"""`nanochat status`: work in progress, here and on other machines."""

import json
from dataclasses import replace

import pytest

from flows.artifacts.revocations import revoke
from flows.artifacts.runs import find_run, write_run
from flows.cli.app import main
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock, run_lock
from flows.leases.held_lease import HeldLease, try_acquire
from flows.overrides import default_name
from flows.run_request import RunRequest
from tests.support.flows.claims import claim
from tests.support.flows.shelf import make_manifest, put_artifact, put_run, todays_shards

REF = todays_shards()


@pytest.fixture(autouse=True)
def home(store, tmp_path):
    """The default home, where a run of `tiny` was interrupted."""
    put_run(store, "tiny-1", status="interrupted", ended="2026-11-21T06:01:00Z")
    return tmp_path / "home"


def change(store, run="tiny-1", **facts):
    """Change the record of a run."""
    found = find_run(store, run)
    assert found is not None
    write_run(store, replace(found, **facts))


def hold_elsewhere(store, ref=REF, run="run-b"):
    """Return the lease of `ref`, held by a process of another machine."""
    held = try_acquire(store, ref, claim("b", run=run))
    assert isinstance(held, HeldLease)
    return held


def test_a_run_that_no_process_builds_is_shown_with_the_command_that_resumes(store, terminal):
    terminal.shows("status tiny")
    older = put_run(store, "tiny-20260101t000000z-0a1b").run  # finished
    assert terminal.said("status", "tiny")[0] == "run tiny-1: interrupted"
    assert "resume" not in terminal.hears("status", older)


def test_the_command_that_resumes_is_at_the_runs_own_place_and_pace(home, store, terminal):
    place = ("device_batch_size=4", "save_every_steps=50")
    change(store, gpus=0, place=place, overrides=("seed=2",))
    terminal.shows("status", "tiny", "--home", str(home))


def test_the_command_that_resumes_keeps_the_name_of_the_run(store, terminal):
    own = default_name(RunRequest(overrides=("seed=2",)))
    for name in ("mine", own):
        put_run(store, f"{name}-1", name=name, overrides=("seed=2",), status="failed")
        terminal.shows(f"status {name}-1")


def test_a_builder_on_another_machine_is_shown_with_its_progress(store, terminal):
    held = hold_elsewhere(store)
    held.note(step=310, total=900)
    held.renew()
    lines = terminal.said("status", "tiny")
    assert any(line.startswith("! shards") for line in lines)
    assert lines[-1].startswith(
        "shards is being built by run run-b on host host-b, step 310/900, heartbeat"
    )


# Artifacts that were given.


def given(store, *uses):
    """A chat model of a run called `theirs`, which the run of `tiny` was given under such names."""
    model = put_artifact(store, make_manifest("sft", config={"seed": 1}))
    put_run(store, "theirs-1", model, name="theirs")
    change(store, uses=uses, stages={"sft": model.fingerprint})
    return model


@pytest.mark.parametrize("name", ["sft@theirs", "theirs"])
def test_what_was_given_is_what_it_was_at_the_time(store, terminal, name):
    given(store, name)
    terminal.shows("status tiny")
    other = put_artifact(store, make_manifest("sft", config={"seed": 2}))
    put_run(store, "theirs-2", other, name="theirs", started="2026-11-22T06:00:00Z")
    terminal.shows("status tiny")
    store.delete("runs/theirs-1.json")
    store.delete("runs/theirs-2.json")
    terminal.shows("status tiny")  # a name that stands for nothing any more is no error


def test_a_run_keeps_its_default_name_when_what_was_given_moved(store, terminal):
    given(store, "sft@theirs")
    change(store, name=default_name(RunRequest(use=("sft@theirs",))))
    assert terminal.said("status", "tiny-1")[-1].endswith("run tiny --use sft@theirs")
    store.delete("runs/theirs-1.json")
    terminal.shows("status tiny-1")


def test_that_what_was_given_is_revoked_or_gone_is_reported(store, terminal):
    model = given(store, "sft@theirs")
    revoke(store, model, why="bad data", who="me@here", when="2026-11-22T06:00:00Z")
    terminal.shows("status tiny")
    store.delete(f"sft/{model.fingerprint}/manifest.json")
    terminal.shows("status tiny")
    assert terminal.read("status", "tiny")[0]["run"] == "tiny-1"
    change(store, stages={})  # it ended before it reported what it was given
    terminal.shows("status tiny")


def test_a_setting_that_exists_no_more_is_no_error(store, terminal):
    change(store, overrides=("pretrain.gone=1",))
    terminal.shows("status tiny")


# Whether a process executes the run.


def die(home, store, *runs):
    """Leave these runs as commands that were killed do."""
    for run in runs:
        put_run(store, run, name=run.rpartition("-")[0], status="running", ended=None)
        with pytest.raises(KeyboardInterrupt), run_lock.hold(home, run, store=store.url):
            raise KeyboardInterrupt


def test_the_end_of_a_run_whose_process_died_is_recorded_by_the_next_command(home, store, terminal):
    die(home, store, "tiny-2", "tiny-d1-1", "other-7")
    with run_lock.hold(home, "tiny-d1-2", store=store.url):
        made = {"sft": "ab" * 32}
        put_run(store, "tiny-d1-2", name="tiny-d1", status="running", ended=None, stages=made)
        terminal.shows("status")
        terminal.shows("status tiny-2")
        terminal.shows("status tiny-d1-2")
    for run in ("tiny-2", "tiny-d1-1", "other-7"):
        found = find_run(store, run)
        assert (found.status, found.ended is not None) == ("interrupted", True)


@pytest.mark.parametrize("words", ["status tiny-2 -f", "status tiny-2", "ls"])
def test_any_command_that_shows_runs_records_the_end(home, store, words):
    die(home, store, "tiny-2")
    assert main(words.split()) == ("-f" in words)
    found = find_run(store, "tiny-2")
    assert found.status == "interrupted"


def test_a_run_that_ended_before_its_process_died_keeps_its_state(home, store, terminal):
    die(home, store, "tiny-2", "tiny-3", "tiny-4", "tiny-5")
    change(store, "tiny-2", status="finished", ended="2026-11-21T06:01:00Z")
    change(store, "tiny-3", status="failed", ended="2026-11-21T06:01:00Z")
    store.delete("runs/tiny-4.json")  # it died before it wrote a record
    store.put("runs/tiny-5.json", b"{")
    terminal.shows("status")
    # Only a run that could not be ended is examined again.
    assert [path.name for path in (home / "runs").iterdir()] == ["tiny-5.lock"]


@pytest.mark.parametrize(("run", "is_shown"), [("tiny-d1-9", False), ("tiny-1", True)])
def test_what_this_run_builds_with_earlier_code_is_shown_and_no_other_runs_work(
    home, store, terminal, run, is_shown
):
    ref = ArtifactRef("pretrain", "ab" * 32)  # not in today's plan
    job = file_lock.work_directory(home / "work", ref)
    job.mkdir(parents=True)
    # With a field that today's jobs do not have.
    tree = {"format": 1, "stage": ref.stage, "fingerprint": ref.fingerprint, "more": 1}
    (job / "job.json").write_text(json.dumps(tree))
    hold_elsewhere(store, ref, run)
    last = terminal.said("status", "tiny")[-1]
    if is_shown:
        assert last.startswith("pretrain is being built by run tiny-1 on host host-b, heartbeat")
    else:
        assert last == "nothing of it is being built; resume with: nanochat run tiny"
