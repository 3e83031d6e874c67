"""`nanochat status --follow` prints what stages logged, here and in the store."""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.runs import Run, Status, find_run, write_run
from flows.cli.app import main
from flows.identity.manifest import File, Manifest
from flows.leases import run_lock
from flows.leases.file_lock import work_directory
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import BEAT
from infra.storage.base import Store
from infra.storage.files import sha256_of
from tests.support.flows.claims import claim
from tests.support.flows.fixtures import nothing
from tests.support.flows.shelf import make_manifest, put_artifact, put_run, todays_shards

NOON = 1_795_435_200.0  # 12:00 UTC
STEPS: list[dict[str, Any]] = [
    {"kind": "start", "step": 0, "total": 2, "unit": "step", "resumed": False},
    {"kind": "step", "step": 1, "total": 2, "values": {"loss": 2.34567}},
    {"kind": "message", "text": "a\x1b[2J line"},
    {"kind": "step", "step": 2, "total": 2, "values": {}},
    {"kind": "eval", "step": 2, "values": {"val_loss": 2.0}},
]
REF = todays_shards()


def write_events(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"time": NOON + at, **event}) for at, event in enumerate(events))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def with_logs(store: Store, directory: Path, **logs: str) -> Manifest:
    """An artifact of sft with these logs."""
    manifest = make_manifest("sft")
    files: list[File] = []
    for name, text in logs.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        key = f"{manifest.ref.prefix}/logs/a/{name}"
        store.put(key, path.read_bytes())
        called = name.replace("_", ".")
        files.append(File(path=called, size=len(text), sha256=sha256_of(path), key=key))
    return put_artifact(store, replace(manifest, logs=tuple(files)))


def test_a_finished_stage_is_read_from_the_store(terminal, store, tmp_path):
    write_events(tmp_path / "events", STEPS)
    text = (tmp_path / "events").read_text(encoding="utf-8")
    made = with_logs(store, tmp_path, events_jsonl=text, worker_log="hello\n\x1b[2Jworld\n")
    put_run(store, "tiny-1", made)
    terminal.shows("status tiny --tail 99")
    assert terminal.said("status", "tiny", "sft") == terminal.said("status", "tiny", "-f")
    store.put(f"{made.ref.prefix}/logs/a/events_jsonl", text.replace("2.3", "9.9").encode())
    terminal.shows("status tiny -f")


def test_a_terminal_shows_the_last_screenful_and_says_how_to_see_the_rest(
    terminal, store, tmp_path, capsys, monkeypatch
):
    steps = [{"kind": "step", "step": n, "total": 50, "values": {}} for n in range(1, 51)]
    write_events(tmp_path / "events", steps)
    text = (tmp_path / "events").read_text(encoding="utf-8")
    put_run(store, "tiny-1", with_logs(store, tmp_path, events_jsonl=text, worker_log="hello\n"))
    whole = terminal.said("status", "tiny", "--tail", "99")  # a file or a pipe gets all
    assert len(whole) == 52

    def printed(*words: str) -> tuple[list[str], str]:
        assert main(["status", "tiny", "-f", *words]) == 0
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err

    assert printed("--tail", "52") == printed("-n", "99") == (whole, "")
    left_out = "{} earlier lines left out; --tail 52 prints all\n"
    assert printed("--tail", "3") == (whole[-3:], left_out.format(49))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for lines, shown in ((24, 22), (5, 10), (60, 52)):
        monkeypatch.setenv("LINES", str(lines))
        left = "" if shown == 52 else left_out.format(52 - shown)
        assert printed() == (whole[-shown:], left)


def test_an_unfinished_stage_is_read_from_this_machine(terminal, store, tmp_path):
    put_run(store, "tiny-1", status="interrupted")
    work = work_directory(tmp_path / "home" / "work", REF)
    write_events(work / "events.jsonl", STEPS[:2])
    (work / "worker.log").write_text("it broke\n")
    lines = terminal.said("status", "tiny", "--tail", "99")
    assert [line.split()[0] for line in lines] == ["12:00:00", "12:00:01", f"{REF.name}:", "it"]
    assert terminal.follows("tiny", "shards", status="interrupted") == lines


def ending(store: Store, run: Run, status: Status = "failed") -> Callable[[], None]:
    """Return what ends a run."""
    return lambda: write_run(store, replace(run, status=status))


def test_a_run_is_followed_until_it_has_ended(terminal, store, tmp_path, polls):
    run = put_run(store, "tiny-1", status="running")
    events = work_directory(tmp_path / "home" / "work", REF) / "events.jsonl"
    write_events(events, STEPS[:1])
    more, again = (lambda n=n: write_events(events, STEPS[:n]) for n in (5, 1))

    def end() -> None:
        write_events(events, STEPS[:2])
        ending(store, run)()

    polls(nothing, more, nothing, again, end)
    lines = terminal.follows("tiny")
    # Each event once, also when it is built again and those right before the end.
    assert [line.split()[0] for line in lines] == [f"12:00:0{n}" for n in (*range(5), 0, 1)]


def test_logs_of_a_finished_stage_are_read_once_and_whole_whatever_the_tail(
    terminal, store, tmp_path, counted, polls
):
    write_events(tmp_path / "events", STEPS)
    made = with_logs(store, tmp_path, events_jsonl=(tmp_path / "events").read_text("utf-8"))
    run = put_run(store, "tiny-1", status="running")
    run = replace(run, stages={"sft": made.fingerprint})
    polls(nothing, ending(store, run, "running"), nothing, nothing, ending(store, run))
    assert len(terminal.follows("tiny", "--tail", "1")) == len(STEPS)
    assert counted.gets.count(made.logs[0].key) == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Following that asks at every poll whether a process builds the run, and believes it."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr("flows.cli.train.logs._SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setattr("flows.cli.train.logs._MAX_MISSES", 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("profile", ["tiny", "removed"])  # which cannot be planned
def test_following_ends_when_no_process_builds_the_run_any_more(
    store, tmp_path, terminal, profile, polls
):
    put_run(store, "tiny-1", profile=profile, status="running")
    write_events(work_directory(tmp_path / "home" / "work", REF) / "events.jsonl", STEPS[:2])
    polls(nothing, nothing)
    terminal.shows("status tiny -f", code=1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("builds", [True, False])  # else its command waits, for a device perhaps
def test_following_continues_while_a_silent_run_is_alive(terminal, store, tmp_path, polls, builds):
    run = put_run(store, "tiny-1", status="running")
    events = work_directory(tmp_path / "home" / "work", REF) / "events.jsonl"
    write_events(events, STEPS[:1])
    held = try_acquire(store, REF, claim("b")) if builds else None
    command = run_lock.hold(tmp_path / "home", "tiny-1", store=store.url)
    polls(nothing, nothing, nothing, ending(store, run))
    with held.keep(beat=BEAT) if isinstance(held, HeldLease) else command:
        assert len(terminal.follows("tiny")) == 1  # without a note


@pytest.mark.usefixtures("impatient")
def test_following_ends_when_the_command_that_it_waits_for_dies(terminal, store, tmp_path, polls):
    put_run(store, "tiny-1", status="running", ended=None)
    write_events(work_directory(tmp_path / "home" / "work", REF) / "events.jsonl", STEPS[:1])
    command = contextlib.ExitStack()
    command.enter_context(run_lock.hold(tmp_path / "home", "tiny-1", store=store.url))

    def die() -> None:
        with contextlib.suppress(KeyboardInterrupt), command:
            raise KeyboardInterrupt

    polls(nothing, nothing, die, nothing)
    assert len(terminal.follows("tiny", status="interrupted")) == 1  # without a note
    assert find_run(store, "tiny-1").status == "interrupted"
