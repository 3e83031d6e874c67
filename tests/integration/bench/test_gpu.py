"""The quarter of an hour on a GPU: dry, on a CPU, and what it does when a step goes wrong."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from bench.gpu import results, scheduler
from bench.gpu.results import NEEDS_GPU, Entry, Results
from bench.gpu.schedule import HEAD, QUARTER, STEPS, Step, fitting
from bench.gpu.scheduler import Scheduler
from tests.support.flows.waiting import wait_until

ROOT = Path(__file__).parents[3]
# The first step of each program; `make campaign CAMPAIGN=speed` runs them with other levers too.
PROGRAMS = [
    step.name
    for number, step in enumerate(QUARTER)
    if step.program not in {other.program for other in QUARTER[:number]}
]
pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class DryRun:
    """What a dry run found, and printed."""

    steps: dict[str, dict[str, Any]]
    printed: str
    out: Path

    def results(self, step: str) -> dict[str, dict[str, Any]]:
        """The results of a step by name."""
        return {row.get("name", ""): row for row in self.steps[step]["results"]}


def dry_run(out: Path, *options: str, **environment: str) -> DryRun:
    """Run steps dry, those of the quarter by default; environment: that of the peers."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")}
    done = subprocess.run(
        [sys.executable, "bench/gpu", "quarter", "--dry", "--out", str(out), *options],
        cwd=ROOT,
        env=own | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    steps = json.loads((out / "results.json").read_text())["steps"]
    return DryRun({step["name"]: step for step in steps}, done.stdout, out)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """A dry run of each program of the quarter."""
    return dry_run(tmp_path_factory.mktemp("quarter"), "--only", *PROGRAMS)


@pytest.mark.timeout(900)
def test_each_program_runs_dry_and_claims_nothing_that_only_a_gpu_gives(dry: DryRun) -> None:
    assert list(dry.steps) == PROGRAMS
    status = {name: step["status"] for name, step in dry.steps.items()}
    # A save of a small model is the same on a CPU: this step leaves nothing out.
    assert status == dict.fromkeys(status, NEEDS_GPU) | {"memory": "ok"}
    assert sorted(path.name for path in dry.out.iterdir()) == [
        *("log.txt", "results.json", "table.txt")
    ]
    for case in ("d12", "slice"):
        assert f"{case}: speed, MFU, energy, clocks, kernels" in dry.steps[case]["why"]
        assert (
            "HEAD is skipped: NANOCHAT_DIR names no checkout of nanochat"
            in (dry.steps[case]["lines"])
        )
        classes = dry.results(case)[f"profile {case} we"]["classes"]
        assert classes["optimizer"]["products"] > 0
        assert classes["loss"]["products"] > 0
    assert "slice we, bound" in dry.results("slice")
    assert "product d1 up, dW" in dry.results("products")
    assert dry.results("decode")["profile decode torch, 2 rows"]["classes"]["rest"]["products"] > 0
    # The tests for a GPU are collected, and skipped.
    assert dry.results("gpu tests")["tests"]["counts"].keys() == {"skipped"}
    assert dry.results("gpu tests")["tests"]["counts"]["skipped"] > 50


@pytest.mark.timeout(900)
def test_the_training_makes_a_chat_model_by_every_stage_with_a_kill_in_it(dry: DryRun) -> None:
    found = dry.results("training")
    stages = [name.removeprefix("stage ") for name in found if name.startswith("stage ")]
    assert stages == [
        *("shards", "task_data", "tokenizer", "tokens", "rows", "pretrain", "midtrain", "sft"),
        *("chat_eval_sft", "rl", "chat_eval_rl", "base_eval"),
    ]
    assert found["stage rl"]["answers"]
    assert len(found["conversation"]["turns"]) == 5
    assert [step for step, _ in found["curve pretrain"]["losses"]] == [1, 2, 3, 4, 4]
    # SFT was killed after it had saved: it resumed there, and did a few steps again.
    steps = [step for step, _ in found["curve sft"]["losses"]]
    assert steps[0] == 1
    assert 0 <= found["curve sft"]["steps_done_again"] < steps[-1] - 2
    assert found["stage sft"]["metrics"]["steps"] == steps[-1]


def test_the_steps_that_fit_are_taken_in_order_of_their_value() -> None:
    def names(minutes: float) -> list[str]:
        return [step.name for step in fitting(((s, s.seconds) for s in STEPS), 60 * minutes)]

    assert names(4) == ["d12", "products", "decode", "slice"]
    assert names(9.7)[:5] == [step.name for step in QUARTER[:5]]
    assert names(15) == [step.name for step in QUARTER]
    assert names(1) == ["products", "d12 rows"]
    # Also if it is ready as late as it may be, the first one ends within four minutes.
    assert STEPS[0].ready + STEPS[0].seconds < 4 * 60


def step_of(directory: Path, name: str, code: str, **fields: Any) -> Step:
    """A step that runs `code`, with FOLDER in it replaced by the directory."""
    path = directory / f"{name.replace(' ', '-')}.py"
    path.write_text(code.replace("FOLDER", repr(str(directory))))
    defaults = {"seconds": 60, "options": "", "dry": "", "passes": ""}
    return Step(name=name, program=str(path), **(defaults | fields))


def run(directory: Path, *steps: Step, seconds: float = 600.0, gpu: Any = None) -> list[Entry]:
    """Run steps, on a GPU or on none; return what is known of each."""
    entries = [Entry(step=step) for step in steps]
    found = Results(directory / "out", entries)
    Scheduler(entries, found, seconds=seconds, cores=8, gpu=gpu, dry=True).run()
    return entries


def stored(directory: Path) -> list[dict[str, Any]]:
    return json.loads((directory / "out" / "results.json").read_text())["steps"]


# Its child has a process group of its own, and is stopped, as a side that is held.
HANGS = """
import os, pathlib, signal, subprocess, sys, time
print('{"name": "half"}', flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
os.killpg(child.pid, signal.SIGSTOP)
pathlib.Path(FOLDER, "child").write_text(str(child.pid))
time.sleep(600)
"""
FAILS = "print('a line'); print('{\"name\": 1}', flush=True); raise ValueError('no such kernel')"
# A step's code and limits, and what is stored of it: why it failed first and last, its results.
FAILED: dict[str, tuple[str, dict[str, int], tuple[str, str], list[object]]] = {
    "hangs": (HANGS, {"seconds": 3}, ("took longer than 3 s",) * 2, [{"name": "half"}]),
    "late": ("import time; time.sleep(600)", {"ready": 2}, ("was not ready after 2 s",) * 2, []),
    "fails": (FAILS, {}, ("ended with 1", "ValueError: no such kernel"), [{"name": 1}]),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_step_that_fails_is_ended_with_all_it_started_and_the_rest_goes_on(
    name: str, tmp_path: Path
) -> None:
    code, limits, why, results = FAILED[name]
    failing = step_of(tmp_path, name, code, **limits)
    run(tmp_path, failing, step_of(tmp_path, "next", "print('well')"))
    first, second = stored(tmp_path)
    assert first["status"] == "failed"
    assert (first["why"][0], first["why"][-1], first["results"]) == (*why, results)
    assert (second["status"], second["lines"]) == ("ok", ["well"])
    assert f"    ! {why[1]}" in (tmp_path / "out" / "table.txt").read_text()
    if name == "hangs":
        wait_until(lambda: is_gone(int((tmp_path / "child").read_text())))
    if name == "fails":
        assert first["lines"] == ["a line"]
        assert "fails: ValueError: no such kernel" in (tmp_path / "out" / "log.txt").read_text()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not noticed."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


class VirtualProgram:
    """A program that prepares for so many seconds, and then runs for so many, of a virtual time."""

    now = 0.0
    alive: ClassVar[list["VirtualProgram"]] = []

    def __init__(self, argv: list[str], *, prepares: bool, **_: object) -> None:
        self.prepares, self.runs = map(float, argv)
        self.is_held, self.has_turn = False, not prepares
        self.alive.append(self)

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now += seconds
        for program in cls.alive:
            if not program.is_ready:
                program.prepares -= 0.0 if program.is_held else seconds
            elif program.has_turn:
                program.runs -= seconds

    @property
    def is_ready(self) -> bool:
        return self.prepares <= 0.0

    def ended(self) -> int | None:
        return 0 if self.runs <= 0.0 else None

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False

    def give_turn(self) -> None:
        self.has_turn = True

    def close(self) -> None:
        self.alive.remove(self)


# Steps: the seconds in which each prepares and runs, its limits. -> When each had the GPU.
ORDERS: dict[str, tuple[dict[str, tuple[str, dict[str, Any]]], dict[str, int]]] = {
    "one at a time, the most valuable that is ready, a quiet one after what is worth more": (
        {
            "slow": ("9 5", {"ready": 60}),
            "quick": ("2 5", {"ready": 60, "quiet": False}),
            "quiet": ("3 5", {"ready": 60}),
        },
        {"quick": 2, "slow": 9, "quiet": 14},
    ),
    "a quiet step stops what is prepared meanwhile": (
        {"timed": ("2 10", {"ready": 60}), "held": ("5 1", {"ready": 60})},
        {"timed": 2, "held": 15},
    ),
    "a less valuable step never takes the time of a more valuable one": (
        # 55 s are left but for the margin: 40 for the first, so 15 for others until it has ended.
        {
            "valuable": ("4 9", {"ready": 60, "seconds": 40}),
            "long": ("0 1", {"seconds": 30, "quiet": False}),
            "short": ("0 1", {"seconds": 10, "quiet": False}),
        },
        {"short": 0, "valuable": 4, "long": 13},
    ),
    "steps prepare at the same time as the GPU's memory allows": (
        {name: ("2 1", {"ready": 60, "gigabytes": 50}) for name in ("one", "two")},
        {"one": 2, "two": 5},
    ),
    "a step without its time or its peer is skipped": (
        {"too long": ("0 1", {"seconds": 100}), "peerless": ("0 1", {"peer": HEAD})},
        {},
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_the_gpu_is_given_to_one_step_at_a_time(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, expected = ORDERS[rule]
    monkeypatch.delenv(HEAD, raising=False)
    monkeypatch.setattr(VirtualProgram, "now", 0.0)
    clock = SimpleNamespace(monotonic=lambda: VirtualProgram.now, sleep=VirtualProgram.sleep)
    for module in (results, scheduler):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(scheduler, "Program", VirtualProgram)
    defaults = {"seconds": 20, "options": "", "dry": "", "passes": ""}
    made = [Step(name=name, program=steps[name][0], **defaults | steps[name][1]) for name in steps]
    gpu = SimpleNamespace(total_bytes=80e9, sample=lambda: (1980, 2619, None, 50, 4))
    entries = run(tmp_path, *made, seconds=60 if "short" in steps else 90, gpu=gpu)
    began = {e.step.name: e.began_at for e in entries if e.began_at is not None}
    assert began == pytest.approx(expected, abs=0.5)
    assert {e.status for e in entries if e.step.name in began} <= {"ok"}
    assert {e.status for e in entries if e.step.name not in began} <= {"skipped"}
    # The clocks of the time that each had the GPU.
    assert {e.clocks["sm_mhz"] for e in entries if e.clocks} <= {1980}


PROGRAM = """
import sys
from bench.gpu import __main__ as main
from bench.gpu.schedule import Step
main.STEPS = {steps!r}
sys.argv = ["bench/gpu", "quarter", "--dry", "--out", {out!r}]
main.main()
"""


def _argv_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_it_leaves_the_results_so_far_and_no_child(
    number: signal.Signals, tmp_path: Path
) -> None:
    steps = (
        step_of(tmp_path, "first", 'print(\'{"name": "done"}\')', quiet=False),
        step_of(tmp_path, "endless", "import os, time; print(os.getpid()); time.sleep(600)"),
        step_of(tmp_path, "compiles", "import time; time.sleep(600)", ready=100),
        step_of(tmp_path, "later", "raise AssertionError"),
    )
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(steps=steps, out=str(tmp_path / "out"))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    with program.stdout as lines:
        shown = next(line for line in lines if "endless: " in line and line.split()[-1].isdigit())
        pid = int(shown.split()[-1])
        program.send_signal(number)
        printed = lines.read() if number == signal.SIGTERM else ""
    code = program.wait(60)
    kept = stored(tmp_path)
    assert (kept[0]["status"], kept[0]["results"]) == ("ok", [{"name": "done"}])
    wait_until(lambda: is_gone(pid))
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_argv_of(p))]
    if number == signal.SIGKILL:
        assert [step["status"] for step in kept[1:]] == ["running", "preparing", "waiting"]
        return
    assert code == 1
    assert [step["status"] for step in kept[1:]] == ["failed", "failed", "skipped"]
    assert {step["why"][0] for step in kept[1:]} == {"stopped by a signal"}
    assert printed.rstrip().endswith("1 ok, 2 failed, 1 skipped")


def test_without_a_gpu_it_says_how_to_run_dry_and_loads_no_torch(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-X", "importtime", "bench/gpu", "quarter", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "finds no GPU here\nhint: --dry" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.split()[-1:] == ["torch"]]
