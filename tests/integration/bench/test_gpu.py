"""The program for half an hour on a GPU: dry, on a CPU, and what it does when a step goes wrong."""

import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.main import NEEDS_GPU, Outcome, Results, run_in_time, run_step, table
from bench.gpu.steps import HEAD, Step

ROOT = Path(__file__).parents[3]
# One step that runs tests, one that measures, and one that is skipped for want of a peer; in
# tests.campaigns.bench.test_gpu every step runs dry.
SHORT = ("gpu tests", "kernels", "decode")
pytestmark = pytest.mark.torch


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class DryRun:
    """What a dry run recorded, printed and logged."""

    rows: list[dict[str, Any]]
    printed: str
    logs: Path

    def result(self, step: str) -> dict[str, Any]:
        """The last result of a step."""
        return [r["result"] for r in self.rows if r.get("step") == step and "result" in r][-1]


def dry_run(out: Path, *options: str, **environment: str) -> DryRun:
    """Run steps dry, all by default; environment: that of the peers."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")}
    done = subprocess.run(
        [sys.executable, "bench/gpu/main.py", "all", "--dry", "--out", str(out), *options],
        cwd=ROOT,
        env=own | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return DryRun(rows_of(out / "results.jsonl"), done.stdout, out / "logs")


@pytest.mark.timeout(900)
def test_dry_steps_run_and_none_claims_what_only_a_gpu_gives(tmp_path: Path) -> None:
    dry = dry_run(tmp_path, "--budget", "800", "--only", *SHORT)
    found = {row["step"]: row["status"] for row in dry.rows if "status" in row}
    assert found == dict.fromkeys(SHORT, NEEDS_GPU) | {"decode": "skipped"}
    assert {row["step"] for row in dry.rows if "result" in row} == {*SHORT} - {"decode"}
    for name in SHORT:
        assert f"\n{name:<16}" in dry.printed
    # The tests for a GPU are collected, and skipped.
    (counts,) = [row["result"]["counts"] for row in dry.rows if "counts" in row.get("result", {})]
    assert counts.keys() == {"skipped"}
    assert counts["skipped"] > 50


def test_without_a_gpu_it_says_how_to_run_dry(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "bench/gpu/main.py", "right", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "finds no GPU here\nhint: --dry" in done.stderr


def test_it_loads_no_torch() -> None:
    code = "import sys, bench.gpu.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def step_of(directory: Path, code: str, *, seconds: int = 30, peer: str | None = None) -> Step:
    """A step that runs `code`."""
    path = directory / "program.py"
    path.write_text(code)
    return Step(
        name="a step", seconds=seconds, program=str(path), options="", dry="", passes="", peer=peer
    )


def run(step: Step, directory: Path, *, limit: float = 60.0) -> tuple[Outcome, list[Any]]:
    (directory / "logs").mkdir()
    results: list[Any] = []
    outcome = run_step(step, directory, lambda **row: results.append(row), limit=limit, dry=False)
    return outcome, results


def test_results_are_recorded_before_the_step_ends(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
print('{{"name": "first"}}', flush=True)
while not pathlib.Path({str(tmp_path / "seen")!r}).exists():
    time.sleep(0.01)
"""
    (tmp_path / "logs").mkdir()
    results = Results(tmp_path / "results.jsonl")

    def record(**row: Any) -> None:
        results.append(**row)
        (tmp_path / "seen").touch()

    outcome = run_step(step_of(tmp_path, code), tmp_path, record, limit=60.0, dry=False)
    assert outcome.status == "ok"
    assert rows_of(tmp_path / "results.jsonl")[0]["result"] == {"name": "first"}


def test_a_step_that_fails_is_shown_with_the_last_lines_of_its_output(tmp_path: Path) -> None:
    code = "print('a line'); print('{\"name\": 1}', flush=True); raise ValueError('no such kernel')"
    outcome, results = run(step_of(tmp_path, code), tmp_path)
    assert outcome.status == "failed"
    assert outcome.why[0] == "ended with 1"
    assert outcome.why[-1] == "ValueError: no such kernel"
    assert results == [{"result": {"name": 1}}]
    lines = list(table([outcome]))
    assert "    a line" in lines
    assert "    ! ValueError: no such kernel" in lines
    assert lines[-1] == "1 failed"


def test_a_step_out_of_time_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    # Its child has a process group of its own, and is stopped, as a side that is held.
    code = f"""
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
os.killpg(child.pid, signal.SIGSTOP)
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    outcome, _ = run(step_of(tmp_path, code), tmp_path, limit=5.0)
    assert outcome.status == "failed"
    assert outcome.why[0] == "took longer than 5 s"
    child = Path("/proc") / (tmp_path / "child").read_text()
    until = time.monotonic() + 60
    while child.exists() and (child / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_ended_by_a_signal_it_ends_its_step_and_prints_the_table(tmp_path: Path) -> None:
    step = step_of(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    code = f"""
import sys
from types import SimpleNamespace
from bench.gpu import main
from bench.gpu.steps import Step
main.find_gpu = lambda: SimpleNamespace(name="a GPU", driver="1")
main.find_steps = lambda *_: [{step!r}]
sys.argv = ["main.py", "right", "--out", {str(tmp_path / "out")!r}]
main.main()
"""
    program = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program.stdout as lines:
        shown = next(line for line in lines if line.startswith("a step: "))
        program.terminate()
        rest = lines.read().splitlines()
    assert program.wait(60) == 1
    pid = shown.split()[-1]
    assert not (Path("/proc") / pid).exists()
    assert rest[-4:] == [f"    {pid}", "    ! ended with -9", "", "1 failed"]


def test_a_result_that_needs_a_gpu_is_never_ok(tmp_path: Path) -> None:
    code = """print('{"name": "one"}'); print('{"name": "flex", "needs": "a GPU"}')"""
    outcome, _ = run(step_of(tmp_path, code), tmp_path)
    assert (outcome.status, outcome.why) == (NEEDS_GPU, ["flex"])


@pytest.mark.parametrize(
    ("left", "peer", "why"),
    [
        (29.9, None, r"30 s are left, it takes 30"),
        (100.0, HEAD, "NANOCHAT_DIR names no checkout of nanochat"),
    ],
)
def test_a_step_without_its_time_or_its_peer_is_skipped(
    left: float, peer: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HEAD, raising=False)
    results = Results(tmp_path / "results.jsonl")
    run = partial(run_in_time, options=Namespace(dry=False), out=tmp_path, results=results)
    step = step_of(tmp_path, "raise AssertionError", peer=peer)
    outcome = run(step, deadline=time.monotonic() + left)
    assert (outcome.status, outcome.why) == ("skipped", [why])
    assert rows_of(tmp_path / "results.jsonl")[-1]["why"] == [why]


def test_every_row_of_results_is_whole(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    threads = [
        threading.Thread(target=lambda i=i: [results.append(step=i) for _ in range(20)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows_of(tmp_path / "results.jsonl")) == 80


def test_overlapping_kernels_count_once() -> None:
    from bench.gpu.profile_step import merged

    assert merged([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0)]) == [(0.0, 3.0), (5.0, 7.0)]
