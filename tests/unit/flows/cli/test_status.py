"""What `nanochat status` says of work in progress, here and on other machines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.artifacts.revocations import revoke
from flows.artifacts.runs import find_run, write_run
from flows.cli.app import main
from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef, short
from flows.leases import file_lock, run_lock
from flows.leases.held_lease import HeldLease, try_acquire
from flows.overrides import default_name
from flows.profiles import open_profile
from flows.stages import SHARDS
from infra.storage.base import Store
from infra.storage.open import open_store
from tests.support.flows.claims import claim
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

RUN = open_profile("tiny").run
FINGERPRINT = identify(SHARDS, RUN, {}, code=Code(REPOSITORY)).fingerprint
REF = ArtifactRef("shards", FINGERPRINT)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default home of this test, where a run of `tiny` was interrupted."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("NANOCHAT_HOME", str(home))
    monkeypatch.setenv("NANOCHAT_STORE", (tmp_path / "store").as_uri())
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    put_run(store_of(home), "tiny-1", status="interrupted", ended="2026-11-21T06:01:00Z")
    return home


def store_of(home: Path) -> Store:
    return open_store((home.parent / "store").as_uri())


def held_elsewhere(home: Path, ref: ArtifactRef = REF, run: str = "run-b") -> HeldLease:
    """Return the lease of `ref`, held by a process of another machine."""
    held = try_acquire(store_of(home), ref, claim("b", run=run))
    assert isinstance(held, HeldLease)
    return held


def said(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["status", "tiny"]) == 0
    return capsys.readouterr().out


def test_a_run_that_no_process_builds_is_shown_with_the_command_that_resumes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys).endswith("nothing of it is being built; resume with: nanochat run tiny\n")


def test_the_command_that_resumes_is_at_the_runs_own_place_and_pace(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = find_run(store_of(home), "tiny-1")
    assert run is not None
    place = ("device_batch_size=4", "save_every_steps=50")
    write_run(store_of(home), replace(run, gpus=0, place=place, overrides=("seed=2",)))
    expected = (
        f"nanochat run tiny --set seed=2 --home {home} --gpus 0 "
        "--place device_batch_size=4 --place save_every_steps=50 --name tiny"
    )
    assert main(["status", "tiny", "--home", str(home)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"resume with: {expected}\n")
    assert f"  command  {expected}\n" in printed


def test_the_newest_run_of_a_name_is_shown_with_the_command_that_keeps_its_name(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_run(store_of(home), "tiny-20260101t000000z-0a1b")  # finished, but older
    assert said(capsys).startswith("run tiny-1: interrupted\n")
    own = default_name("tiny", overrides=("seed=2",))
    for name, option in (("mine", " --name mine"), (own, "")):
        run = f"{name}-1"
        put_run(store_of(home), run, name=name, overrides=("seed=2",), status="failed")
        assert main(["status", run]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.endswith(f"resume with: nanochat run tiny --set seed=2{option}")


def test_a_builder_on_another_machine_is_shown_with_its_progress(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = held_elsewhere(home)
    held.note(step=310, total=900)
    held.renew()
    told = said(capsys)
    assert "! shards" in told
    assert "shards is being built by run run-b on host host-b, step 310/900, heartbeat" in told
    assert "resume with" not in told


def test_a_builder_on_this_machine_is_shown_with_its_jobs_last_step(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_elsewhere(home)
    work = home / "work"
    job = file_lock.work_directory(work, REF)
    with file_lock.try_hold(file_lock.lock_path(work, REF)):
        assert "shards is being built by run run-b" in said(capsys)  # no event yet
        job.mkdir()
        (job / "events.jsonl").write_text('{"kind": "step", "step": 7, "total": 9, "values": {}}\n')
        assert "step 7/9" in said(capsys)


def test_another_builder_does_not_pass_for_a_job_that_was_left_here(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_elsewhere(home)
    job = file_lock.work_directory(home / "work", REF)
    job.mkdir(parents=True)
    (job / "events.jsonl").write_text('{"kind": "step", "step": 7, "total": 9}\n')
    assert "step 7/9" not in said(capsys)


# Artifacts that were given.


def given(home: Path, *uses: str) -> Manifest:
    """A chat model of a run called `theirs`, which the run of `tiny` was given under such names."""
    store = store_of(home)
    model = put_artifact(store, make_manifest("sft", config={"seed": 1}))
    put_run(store, "theirs-1", model, name="theirs")
    run = find_run(store, "tiny-1")
    assert run is not None
    write_run(store, replace(run, uses=uses, stages={"sft": model.fingerprint}))
    return model


@pytest.mark.parametrize("name", ["sft@theirs", "theirs"])
def test_what_was_given_is_what_it_was_at_the_time(
    home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = given(home, name)
    told = said(capsys)
    assert f"= sft                 done         {short(model.fingerprint)}\n" in told
    assert "pretrain" not in told
    assert told.endswith(f"resume with: nanochat run tiny --use {name} --name tiny\n")
    other = put_artifact(store_of(home), make_manifest("sft", config={"seed": 2}))
    put_run(store_of(home), "theirs-2", other, name="theirs", started="2026-11-22T06:00:00Z")
    told = said(capsys)
    assert f"= sft                 done         {short(model.fingerprint)}\n" in told
    command = f"nanochat run tiny --use sft/{short(model.fingerprint)} --name tiny"
    assert told.endswith(f"resume with: {command}\n")


def test_a_run_keeps_its_default_name_when_what_was_given_moved(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = given(home, "sft@theirs")
    run = find_run(store_of(home), "tiny-1")
    assert run is not None
    name = default_name("tiny", use=run.uses)
    write_run(store_of(home), replace(run, name=name))
    assert main(["status", "tiny-1"]) == 0
    assert capsys.readouterr().out.endswith("with: nanochat run tiny --use sft@theirs\n")
    store_of(home).delete("runs/theirs-1.json")
    assert main(["status", "tiny-1"]) == 0
    words = f"--use sft/{short(model.fingerprint)} --name {name}"
    assert capsys.readouterr().out.endswith(f"resume with: nanochat run tiny {words}\n")


def test_a_name_that_stands_for_nothing_any_more_is_no_error(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = given(home, "sft@theirs")
    store_of(home).delete("runs/theirs-1.json")
    told = said(capsys)
    assert "? rl" in told or "+ rl" in told
    assert told.endswith(f"--use sft/{short(model.fingerprint)} --name tiny\n")


def test_that_what_was_given_is_revoked_or_gone_is_reported(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = given(home, "sft@theirs")
    revoke(store_of(home), model, why="bad data", who="me@here", when="2026-11-22T06:00:00Z")
    told = said(capsys)
    assert f"  given    {model.name}, revoked 2026-11-22T06:00:00Z by me@here: bad data\n" in told
    assert "+ rl" in told
    store_of(home).delete(f"sft/{model.fingerprint}/manifest.json")
    told = said(capsys)
    assert "= sft" in told
    assert told.endswith(
        f"\n\nwhat is left is unknown: {model.name}, which was given to it, is gone\n"
    )
    assert main(["status", "tiny", "--json"]) == 0
    run = find_run(store_of(home), "tiny-1")
    assert run is not None
    write_run(store_of(home), replace(run, stages={}))  # it ended before it said what it was given
    assert f"what is left is unknown: {model.name} of run theirs" in said(capsys)


def test_a_setting_that_is_no_more_is_no_error(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = find_run(store_of(home), "tiny-1")
    assert run is not None
    write_run(store_of(home), replace(run, overrides=("pretrain.gone=1",)))
    told = said(capsys)
    assert "what is left is unknown: " in told
    assert "gone" in told.splitlines()[-1]


# Whether a process executes the run.


def die(home: Path, *runs: str) -> None:
    """Leave these runs as commands that were killed do."""
    for run in runs:
        store = store_of(home)
        put_run(store, run, name=run.rpartition("-")[0], status="running", ended=None)
        with pytest.raises(KeyboardInterrupt), run_lock.hold(home, run, store=store.url):
            raise KeyboardInterrupt


def test_the_end_of_a_run_whose_process_died_is_recorded_by_the_next_look(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die(home, "tiny-2", "tiny-d1-1", "other-7")
    with run_lock.hold(home, "tiny-d1-2", store=store_of(home).url):
        put_run(store_of(home), "tiny-d1-2", name="tiny-d1", status="running", ended=None)
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        states = {line.split()[0]: line.split()[1] for line in lines}
        assert states == {
            "tiny-1": "interrupted",
            "tiny-2": "interrupted",
            "tiny-d1-1": "interrupted",
            "other-7": "interrupted",
            "tiny-d1-2": "running",
        }
        assert main(["status", "tiny-2"]) == 0
        told = capsys.readouterr().out
        assert told.startswith("run tiny-2: interrupted\n")
        assert ", ended " in told
        assert told.endswith("resume with: nanochat run tiny\n")
        assert main(["status", "tiny-d1-2"]) == 0
        told = capsys.readouterr().out
        assert told.startswith("run tiny-d1-2: running\n")
        assert told.endswith(
            "\nits command is running on this machine; no stage is being built now\n"
        )
    for run in ("tiny-2", "tiny-d1-1", "other-7"):
        found = find_run(store_of(home), run)
        assert found is not None
        assert (found.status, found.ended is not None) == ("interrupted", True)


@pytest.mark.parametrize("words", [["status", "tiny-2", "-f"], ["status", "tiny-2"], ["ls"]])
def test_any_command_that_shows_runs_records_the_end(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    die(home, "tiny-2")
    assert main(words) == ("-f" in words)
    found = find_run(store_of(home), "tiny-2")
    assert found is not None
    assert found.status == "interrupted"


def test_a_run_that_ended_before_its_process_died_keeps_its_state(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    die(home, "tiny-2", "tiny-3", "tiny-4")
    ends = "2026-11-21T06:01:00Z"
    put_run(store_of(home), "tiny-2", status="finished", ended=ends)
    put_run(store_of(home), "tiny-3", status="failed", ended=ends)
    store_of(home).delete("runs/tiny-4.json")  # it died before it wrote a record
    store_of(home).put("runs/tiny-5.json", b"{")
    with pytest.raises(KeyboardInterrupt), run_lock.hold(home, "tiny-5", store=store_of(home).url):
        raise KeyboardInterrupt
    assert main(["status"]) == 0
    states = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert (states["tiny-2"], states["tiny-3"]) == ("finished", "failed")
    assert "tiny-4" not in states
    # Only what could not be ended is looked at again.
    assert [path.name for path in (home / "runs").iterdir()] == ["tiny-5.lock"]


def make_job_of_earlier_code(home: Path, run: str) -> None:
    """Have this run build a stage whose fingerprint is not in today's plan."""
    ref = ArtifactRef("pretrain", "ab" * 32)
    job = file_lock.work_directory(home / "work", ref)
    job.mkdir(parents=True)
    # With a field that today's jobs do not have.
    tree = {"format": 1, "stage": ref.stage, "fingerprint": ref.fingerprint, "more": 1}
    (job / "job.json").write_text(json.dumps(tree))
    held_elsewhere(home, ref, run)


def test_what_another_run_builds_on_this_machine_is_not_shown(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job_of_earlier_code(home, "tiny-d1-9")
    told = said(capsys)
    assert "being built by" not in told
    assert told.endswith("nothing of it is being built; resume with: nanochat run tiny\n")


def test_what_this_run_builds_with_earlier_code_is_shown(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job_of_earlier_code(home, "tiny-1")
    told = said(capsys)
    assert "\npretrain is being built by run tiny-1 on host host-b, heartbeat" in told
    assert "resume with" not in told
