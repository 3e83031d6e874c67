"""The quarter of an hour on a GPU: dry, on a CPU, and what it does when a step goes wrong."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.gpu.results import NEEDS_GPU, Entry, Results
from bench.gpu.schedule import HEAD, QUARTER, STEPS, Step, fitting
from bench.gpu.scheduler import Scheduler
from tests.support.flows.waiting import wait_until

ROOT = Path(__file__).parents[3]
# Reports that it is ready, and waits for its turn, as bench.gpu.report.wait_turn.
READY = "import json, sys; print(json.dumps({'ready': True}), flush=True); sys.stdin.readline();"
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


def run(
    directory: Path, *steps: Step, seconds: float = 600.0, gigabytes: float | None = None
) -> list[Entry]:
    """Run steps, on a GPU of so much memory or on none; return what is known of each."""
    entries = [Entry(step=step) for step in steps]
    results = Results(directory / "out", entries)
    gpu: Any = None
    if gigabytes is not None:
        gpu = SimpleNamespace(total_bytes=gigabytes * 1e9, sample=lambda: (1980, 2619, None, 50, 4))
    Scheduler(entries, results, seconds=seconds, cores=8, gpu=gpu, dry=True).run()
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


# The slow one is ready when the others have prepared, and one of them has begun.
SLOW = "import time\nwhile 'quick' not in log.read_text(): time.sleep(0.01)\n"
LOGGING = """
import pathlib, time
log = pathlib.Path(FOLDER, "log")
log.touch()
WAIT
READY
log.open("a").write("NAME "); time.sleep(0.3); log.open("a").write("end ")
""".replace("READY", READY)


def test_one_step_at_a_time_has_the_gpu_the_most_valuable_that_is_ready(tmp_path: Path) -> None:
    steps = [
        step_of(tmp_path, name, LOGGING.replace("NAME", name).replace("WAIT", wait), ready=60, **of)
        for name, wait, of in (
            ("slow", SLOW, {}),
            ("quick", "", {"quiet": False}),
            ("quiet", "", {}),
        )
    ]
    entries = run(tmp_path, *steps)
    # `quiet` was ready with `quick`, and waits for what is worth more and still prepares.
    assert (tmp_path / "log").read_text().split() == ["quick", "end", "slow", "end", "quiet", "end"]
    assert [entry.status for entry in entries] == ["ok", "ok", "ok"]


# The less valuable one writes while it prepares, until the other has had the GPU.
BEATING = f"""
import pathlib, time
beats, over = pathlib.Path(FOLDER, "beats"), pathlib.Path(FOLDER, "over")
while not over.exists():
    beats.open("a").write(".")
    time.sleep(0.01)
{READY}
"""
TIMED = f"""
import pathlib, time
beats = pathlib.Path(FOLDER, "beats")
while not beats.exists():
    time.sleep(0.01)
{READY}
time.sleep(0.5)
before = beats.stat().st_size
time.sleep(1)
print("beats:", beats.stat().st_size - before)
pathlib.Path(FOLDER, "over").touch()
"""


def test_a_quiet_step_stops_what_is_prepared_meanwhile(tmp_path: Path) -> None:
    steps = {"timed": TIMED, "beating": BEATING}
    first, second = run(tmp_path, *(step_of(tmp_path, n, steps[n], ready=60) for n in steps))
    assert (first.status, first.lines) == ("ok", ["beats: 0"])
    assert second.status == "ok"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"seconds": 100}, "it takes 100"),
        ({"peer": HEAD}, "NANOCHAT_DIR names no checkout of nanochat"),
    ],
)
def test_a_step_without_its_time_or_its_peer_is_skipped(
    fields: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HEAD, raising=False)
    step = step_of(tmp_path, "a step", "raise AssertionError", **fields)
    (entry,) = run(tmp_path, step, seconds=90)
    assert entry.status == "skipped"
    assert entry.why[0].endswith(why)


def test_a_less_valuable_step_never_takes_the_time_of_a_more_valuable_one(tmp_path: Path) -> None:
    entries = run(
        tmp_path,
        step_of(tmp_path, "valuable", f"import time; time.sleep(1)\n{READY}", ready=60, seconds=40),
        step_of(tmp_path, "long", "raise AssertionError", seconds=30, quiet=False),
        step_of(tmp_path, "short", "print('well')", seconds=10, quiet=False),
        seconds=60,
    )
    # 55 s are left beside the margin: 40 for the first, so 15 for others until it has ended.
    assert [entry.status for entry in entries] == ["ok", "failed", "ok"]
    began = [entry.began_at or 0.0 for entry in entries]
    assert began[2] < began[0] < began[1]


def test_steps_prepare_beside_each_other_as_the_gpus_memory_allows(tmp_path: Path) -> None:
    entries = run(
        tmp_path,
        *(step_of(tmp_path, name, READY, ready=60, gigabytes=50) for name in ("one", "two")),
        gigabytes=80,
    )
    assert [entry.status for entry in entries] == ["ok", "ok"]
    kept = stored(tmp_path)
    first, second = entries
    assert first.began_at + first.seconds <= second.began_at
    # The clocks of the time that each had the GPU.
    assert kept[0]["clocks"]["sm_mhz"] == 1980
    assert kept[0]["clocks"]["reasons"] == {"power cap": 1.0}


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
