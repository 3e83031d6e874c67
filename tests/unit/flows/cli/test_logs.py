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
from flows.identity.manifest import Manifest
from flows.leases import run_lock
from flows.leases.file_lock import work_directory
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import BEAT
from infra.storage.base import Store
from tests.support.flows.claims import claim
from tests.support.flows.fixtures import nothing
from tests.support.flows.measured import put_file
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


def text_of(events: list[dict[str, Any]]) -> str:
    """Return the log of events that came a second after each other."""
    lines = (json.dumps({"time": NOON + at, **event}) for at, event in enumerate(events))
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file in which this machine's job of the shards logs its events."""
    directory = work_directory(tmp_path / "home" / "work", REF)
    directory.mkdir(parents=True)
    return directory / "events.jsonl"


def with_logs(store: Store, events: list[dict[str, Any]], output: str = "hello\n") -> Manifest:
    """An artifact of sft with these events and this output of its processes."""
    manifest = make_manifest("sft")
    logs = {"events.jsonl": text_of(events), "worker.log": output}
    files = [put_file(store, manifest, name, text.encode()) for name, text in logs.items()]
    return put_artifact(store, replace(manifest, logs=tuple(files)))


def test_a_finished_stage_is_read_from_the_store(terminal, store):
    made = with_logs(store, STEPS, output="hello\n\x1b[2Jworld\n")
    put_run(store, "tiny-1", made)
    terminal.shows("status tiny --tail 99")
    assert terminal.said("status", "tiny", "sft") == terminal.said("status", "tiny", "-f")
    store.put(made.logs[0].key, text_of(STEPS).replace("2.3", "9.9").encode())
    terminal.shows("status tiny -f")


def test_a_terminal_shows_the_last_screenful_and_says_how_to_see_the_rest(
    terminal, store, capsys, monkeypatch
):
    steps = [{"kind": "step", "step": n, "total": 50, "values": {}} for n in range(1, 51)]
    put_run(store, "tiny-1", with_logs(store, steps))
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


def test_an_unfinished_stage_is_read_from_this_machine(terminal, store, log):
    put_run(store, "tiny-1", status="interrupted")
    log.write_text(text_of(STEPS[:2]))
    log.with_name("worker.log").write_text("it broke\n")
    lines = terminal.said("status", "tiny", "--tail", "99")
    assert [line.split()[0] for line in lines] == ["12:00:00", "12:00:01", f"{REF.name}:", "it"]
    assert terminal.follows("tiny", "shards", status="interrupted") == lines


def ending(store: Store, run: Run, status: Status = "failed") -> Callable[[], None]:
    """Return what ends a run."""
    return lambda: write_run(store, replace(run, status=status))


def test_a_run_is_followed_until_it_has_ended(terminal, store, log, polls):
    run = put_run(store, "tiny-1", status="running")
    log.write_text(text_of(STEPS[:1]))
    more, again = (lambda n=n: log.write_text(text_of(STEPS[:n])) for n in (5, 1))

    def end() -> None:
        log.write_text(text_of(STEPS[:2]))
        ending(store, run)()

    polls(nothing, more, nothing, again, end)
    lines = terminal.follows("tiny")
    # Each event once, also when it is built again and those right before the end.
    assert [line.split()[0] for line in lines] == [f"12:00:0{n}" for n in (*range(5), 0, 1)]


def test_logs_of_a_finished_stage_are_read_once_and_whole_whatever_the_tail(
    terminal, store, counted, polls
):
    made = with_logs(store, STEPS, output="")
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
    store, log, terminal, profile, polls
):
    put_run(store, "tiny-1", profile=profile, status="running")
    log.write_text(text_of(STEPS[:2]))
    polls(nothing, nothing)
    terminal.shows("status tiny -f", code=1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("builds", [True, False])  # else its command waits, for a device perhaps
def test_following_continues_while_a_silent_run_lives(
    terminal, store, tmp_path, log, polls, builds
):
    run = put_run(store, "tiny-1", status="running")
    log.write_text(text_of(STEPS[:1]))
    held = try_acquire(store, REF, claim("b")) if builds else None
    command = run_lock.hold(tmp_path / "home", "tiny-1", store=store.url)
    polls(nothing, nothing, nothing, ending(store, run))
    with held.keep(beat=BEAT) if isinstance(held, HeldLease) else command:
        assert len(terminal.follows("tiny")) == 1  # without a note


@pytest.mark.usefixtures("impatient")
def test_following_ends_when_the_command_it_waits_for_dies(terminal, store, tmp_path, log, polls):
    put_run(store, "tiny-1", status="running", ended=None)
    log.write_text(text_of(STEPS[:1]))
    command = contextlib.ExitStack()
    command.enter_context(run_lock.hold(tmp_path / "home", "tiny-1", store=store.url))

    def die() -> None:
        with contextlib.suppress(KeyboardInterrupt), command:
            raise KeyboardInterrupt

    polls(nothing, nothing, die, nothing)
    assert len(terminal.follows("tiny", status="interrupted")) == 1  # without a note
    assert find_run(store, "tiny-1").status == "interrupted"
