"""For `nanochat status`: print what the stages of a run logged, and follow those being built."""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, find_run, timestamp
from flows.artifacts.transfer import read_file
from flows.cli.output import count_of, print_error, print_lines, print_note, print_warning
from flows.cli.train.recorded import describe_live, find_plan, signs_of_life
from flows.identity.manifest import EVENTS
from flows.identity.records import unless_damaged
from flows.identity.ref import ArtifactRef
from flows.leases.file_lock import work_directory
from flows.plan.dead_runs import end_dead_runs, settle
from flows.render.text import number, one_line
from flows.stages import STAGES
from infra.polling import ASK_SECONDS
from infra.retry import NoAnswer, until_answered
from infra.storage.base import Store, StoreUnavailable
from nanochat_core.runtime.progress import read_events

OUTPUT = "worker.log"  # what the processes of a job printed
_SECONDS_BETWEEN_CHECKS = 10.0  # of whether a run that logs nothing is being built: a plan each
_MAX_MISSES = 4  # checks in a row: a command of another machine may be between two stages
_MIN_LINES = 10  # of a terminal that is lower
_WIDTH = max(len(stage.name) for stage in STAGES)
_T = TypeVar("_T")


def print_logs(
    run: Run,
    stage: str | None,
    store: Store,
    home: Path,
    *,
    follow: bool,
    tail: int | None,
) -> int:
    """Print what the stages of a run logged, or one of them, and what their processes printed.

    Logs of finished stages come from the store, those of unfinished stages from this machine. With
    `follow` more is printed until the run has ended, or no process builds it any more. Returns the
    exit code: with `follow` 1 unless the run is finished.
    """
    reach = partial(_reach, follow=follow)
    logs = _Logs(store, home / "work")
    refs = reach(partial(_refs, store, run, home, stage))
    checked, misses, is_first = time.monotonic(), 0, True
    while True:
        lines = [line for ref in refs for line in reach(partial(logs.new_lines, ref))]
        if lines:
            checked, misses = time.monotonic(), 0
        is_lost = misses >= _MAX_MISSES and run.status == "running"
        is_over = not follow or is_lost or run.status != "running"
        if is_over:
            lines += [line for ref in refs for line in reach(partial(logs.output, ref))]
        print_lines(_last(lines, tail) if is_first else lines)
        is_first = False
        if is_over:
            break
        if time.monotonic() - checked >= _SECONDS_BETWEEN_CHECKS:
            checked = time.monotonic()
            misses = 0 if reach(partial(_is_alive, store, run, home)) else misses + 1
        time.sleep(ASK_SECONDS)
        before, run = run, reach(partial(find_run, store, run.run)) or run
        # The fingerprint of a stage is known once its inputs exist.
        if run.stages != before.stages:
            refs = reach(partial(_refs, store, run, home, stage))
    if is_lost:
        print_note(f"no process seen here builds {run.run}; see: nanochat status {run.run}")
    if not any(logs.printed.values()):
        print_note(f"{run.run} has logged nothing that this machine can read")
    if not follow or run.status == "finished":
        return 0
    return 1 if is_lost else print_end(home, run.run, run.status)


def wait_for_record(store: Store, run: str, home: Path) -> Run | None:
    """Return the record of a submitted run once a worker has started it; None if none will.

    Prints what Prefect says of the run whenever that changes.
    """
    from infra.prefect.flow_runs import find_flow_runs

    printed: object = ()
    while (found := _reach(partial(find_run, store, run))) is None:
        known = find_flow_runs(home, run)
        if known is not None and not any(each.is_live for each in known):
            return _reach(partial(find_run, store, run))
        states = known and [(each.id, each.type, each.state) for each in known]
        if states != printed:  # the lines also say for how long, which changes always
            printed = states
            lines = [describe_live(each, run) for each in known or () if each.is_live]
            for line in lines or ["Prefect's server does not answer; following continues"]:
                print_note(line)
        time.sleep(ASK_SECONDS)
    return found


def print_end(home: Path, run: str, status: str | None) -> int:
    """Print how a run ended, as far as Prefect knows it, and return the exit code.

    `status` is that of its record, which is not finished; None if the store has no record.
    """
    from infra.prefect.flow_runs import find_flow_runs

    known = [each for each in find_flow_runs(home, run) or () if each.name == run]
    if status is None and any(each.type == "COMPLETED" for each in known):
        print_note(f"{run} finished in the worker's store: give --store")
        return 0
    error, _, hint = "".join(each.message for each in known[:1]).partition("\nhint: ")
    ended = f"run {run} ended as {status or 'not started'}"
    print_error(one_line(error) or ended, hint=hint or None)
    return 1


def _reach(look: Callable[[], _T], *, follow: bool = True) -> _T:
    """Return what `look` returns; with `follow` repeat it while the store is unavailable."""

    def report(failure: NoAnswer) -> None:
        if failure.tries == 1:
            print_note(f"{failure.error}; the run is not affected, and following continues")

    return until_answered(look, StoreUnavailable, on_failure=report) if follow else look()


def _last(lines: list[str], tail: int | None) -> list[str]:
    """Return the last lines, and print how many others there are. None means a screenful."""
    if tail is None and sys.stdout.isatty():
        # Two lines less: that of the note and that of the shell's prompt.
        tail = max(_MIN_LINES, shutil.get_terminal_size().lines - 2)
    tail = len(lines) if tail is None else tail
    if (left := len(lines) - tail) > 0:
        print_note(f"{count_of(left, 'earlier line')} left out; --tail {len(lines)} prints all")
        return lines[left:]
    return lines


def _refs(store: Store, run: Run, home: Path, stage: str | None) -> list[ArtifactRef]:
    """Return the artifacts of a run: made, or known by today's plan to be built."""
    refs = {ref.stage: ref for ref in run.refs}
    if run.status != "finished" and (plan := find_plan(store, run, home)):
        refs = {item.stage.name: item.ref for item in plan.stages if item.ref} | refs
    return [refs[s.name] for s in STAGES if s.name in refs and stage in (None, s.name)]


def _is_alive(store: Store, run: Run, home: Path) -> bool:
    """Return whether a process builds a run. The end of one that is known to be dead is recorded,
    which ends the following.
    """
    plan = find_plan(store, run, home)
    # Asked first: of a process that dies meanwhile the end is recorded by the next check.
    is_alive = bool(signs_of_life(store, run.run, plan, home))
    end_dead_runs(store, home)
    settle(store, home, find_run(store, run.run) or run)
    return is_alive


@dataclass
class _Logs:
    """The logs of stages, from this machine or from the store, and how far they were printed."""

    store: Store
    work: Path
    printed: dict[ArtifactRef, int] = field(default_factory=dict[ArtifactRef, int])  # bytes
    stored: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def new_lines(self, ref: ArtifactRef) -> list[str]:
        """Return the events that were logged since the last call, as lines."""
        data = self._read(ref, EVENTS)
        start, end = self.printed.get(ref, 0), data.rfind(b"\n") + 1
        if len(data) < start:  # a rebuild writes it again
            start = 0
        self.printed[ref] = end
        with tempfile.NamedTemporaryFile() as file:
            file.write(data[start:end])
            file.flush()
            lines = (_line(ref.stage, event) for event in read_events(Path(file.name)))
            return [line for line in lines if line]

    def output(self, ref: ArtifactRef) -> list[str]:
        """Return what the processes of a job printed, below a heading."""
        lines = self._read(ref, OUTPUT).decode(errors="replace").splitlines()
        head = [f"{ref.name}: output of its processes"] if lines else []
        return [*head, *(f"  {line}" for line in lines)]

    def _read(self, ref: ArtifactRef, name: str) -> bytes:
        """Return a log of this machine's job, else of the artifact; empty if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (work_directory(self.work, ref) / name).read_bytes()
        key = f"{ref.prefix}/{name}"
        # An artifact's logs never change: they are read from the store once.
        if key not in self.stored and (manifest := find_manifest(self.store, ref)) is not None:
            # After a warning the logs of the other stages are printed.
            read = partial(read_file, self.store, manifest, name)
            self.stored[key] = unless_damaged(read, print_warning) or b""
        return self.stored.get(key, b"")


def _line(stage: str, event: dict[str, Any]) -> str | None:
    """Return an event as a line. None means that it has no text."""
    match event:
        case {"kind": "start", "step": step, "total": total, "unit": unit}:
            text = f"{unit} {step} of {total}: started"
        case {"kind": "step", "step": step, "total": total, "values": values}:
            text = f"{step} of {total}{_values(values)}"
        case {"kind": "eval", "step": step, "values": values}:
            text = f"evaluated at {step}{_values(values)}"
        case {"kind": "message", "text": text}:
            pass
        case _:
            return None
    when = event.get("time")
    clock = timestamp(when)[11:19] if isinstance(when, int | float) else " " * 8
    return f"{clock}  {stage:<{_WIDTH}}  {text}"


def _values(values: dict[str, Any]) -> str:
    known = [f"{k} {number(v)}" for k, v in values.items() if isinstance(v, int | float)]
    return f"  {', '.join(known)}" if known else ""
