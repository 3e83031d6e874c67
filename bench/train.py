"""How fast pretraining runs: ours beside nanochat's own script, in turn, in the same run.

    NANOCHAT_DIR=/path/to/nanochat python bench/train.py [--only eager] [--json FILE]

Each side is a process of its own that runs its own loop, stage `pretrain` and scripts/base_train.py
unchanged, on random tokens; it is held between rounds, so that the two alternate. What counts is
the ratio of the medians. Sections are timed in a round of their own, since timing them takes time.
Without NANOCHAT_DIR we run alone. On a GPU: bench/gpu. Exit 1: a case was slower than --at-least,
or our side failed.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from nanochat_core.job import Compile
from nanochat_core.runtime.versions import processor_name

SIDES = ("ours", "peer")
HERE = Path(__file__).resolve().parent
LAST_LINES = 15  # of a failed process, to print
WAIT = 0.2  # seconds
Round: TypeAlias = dict[str, Any]  # what the gate answers


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a step to time."""

    name: str
    depth: int
    device: str  # "cpu" or "cuda"
    precision: str  # "fp32", "bf16" or "fp8"
    rows: int  # per micro-step
    accumulate: int  # micro-steps in a step
    sequence_len: int = 2048
    vocab_size: int = 32768
    attention: str = "sdpa"  # the backend of our side
    # The peer's attention: as shipped, or our backend of that name in place of its own.
    peer_attention: str = "shipped"
    window_pattern: str | None = None  # the peer's option; None: its default
    compile: Compile = True  # our side, and the peer's unless `peer_compile` says otherwise
    peer_compile: bool | None = None
    # Of our side where bench/gpu trains: numerics.fp8_scales and fp8_sums, and three placements.
    fp8_scales: str = "amax"
    fp8_sums: str = "exact"
    qk_kernel: bool = False
    weight_kernel: bool = False
    autotune: bool = False
    width: int | None = None  # there; None: 64 channels a layer

    @property
    def title(self) -> str:
        """The name and the variant."""
        if self.is_compiled("ours") != self.is_compiled("peer"):
            return f"{self.name} as each comes"
        return f"{self.name} {'compiled' if self.compile else 'eager'}"

    def is_compiled(self, side: str) -> bool:
        """Whether a side uses torch.compile."""
        is_ours = side == "ours" or self.peer_compile is None
        return bool(self.compile if is_ours else self.peer_compile)

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.rows * self.accumulate * self.sequence_len


D4 = Case(name="d4", depth=4, device="cpu", precision="fp32", rows=2, accumulate=2)
# On a CPU our product compiles nothing, nanochat's script all that it can.
CASES = {
    "eager": dataclasses.replace(D4, compile=False),
    "bf16": dataclasses.replace(D4, name="d4 bf16", precision="bf16", compile=False),
    "shipped": dataclasses.replace(D4, compile=False, peer_compile=True),
}


class SideFailed(Exception):
    """A side's process ended before its time."""


class Side:
    """One side's process. It compiles and takes its first step as soon as it is started."""

    def __init__(self, command: Sequence[str], directory: Path, *, eager: bool) -> None:
        self._log = directory / "log"
        self._ready = False
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=directory,
                process_group=0,  # so that `hold` reaches the processes that it starts, too
                # Waiting threads sleep soon, as in our product: there is another side.
                env={"GOMP_SPINCOUNT": "1000"}
                | os.environ
                | {
                    "NANOCHAT_BASE_DIR": str(directory),
                    "PYTHONPATH": os.pathsep.join(paths),
                    "TORCHDYNAMO_DISABLE": str(int(eager)),
                },
            )

    def wait_ready(self, seconds: float = math.inf) -> None:
        """Wait until its first step is done, at most so many seconds in which this process is not
        stopped. Raises SideFailed."""
        waited = 0.0
        assert self._process.stdout is not None
        while not self._ready:
            if select.select([self._process.stdout], [], [], WAIT)[0]:
                self._read()
                self._ready = True
            elif (waited := waited + WAIT) >= seconds:
                raise SideFailed(f"was not ready after {seconds:.0f} s")

    def run(self, steps: int, how: str = "run") -> Round:
        """Run this many steps; `how` is one of the gate's words. Raises SideFailed."""
        self.wait_ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{how} {steps}\n")
            self._process.stdin.flush()
        return self._read()

    def hold(self) -> None:
        """Stop its processes, so that they take neither CPU nor GPU time."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def release(self) -> None:
        """Continue its processes."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> Round:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        # torch's errors end with empty lines and advice: the reason is some lines above.
        lines = [line for line in self._log.read_text().splitlines() if line.strip()]
        raise SideFailed("\n    ".join([f"ended with {code}:", *lines[-LAST_LINES:]]))


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description="How fast pretraining runs, beside nanochat's.")
    parser.add_argument("--only", choices=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-least", type=float, default=1.0, help="our speed / the peer's")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    options = parser.parse_args()
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("the peer is skipped: NANOCHAT_DIR names no checkout of nanochat")
    print(describe_machine(options.threads))
    results: list[dict[str, Any]] = []
    for key, case in CASES.items():
        if options.only not in (None, key):
            continue
        print(f"\n{case.title}: {case.tokens:,} tokens a step, {case.rows} rows at a time")
        rounds = measure(
            case, checkout, rounds=options.rounds, steps=options.steps, threads=options.threads
        )
        results.append({"case": dataclasses.asdict(case), "rounds": rounds})
        for line in table(case, rounds):
            print(line)
    if options.json:
        tree = {"machine": describe_machine(options.threads), "results": results}
        options.json.write_text(json.dumps(tree, indent=1))
    failures = find_failures(results, at_least=options.at_least)
    for line in failures:
        print(line)
    sys.exit(1 if failures else 0)


def measure(
    case: Case, checkout: str | None, *, rounds: int, steps: int, threads: int
) -> dict[str, list[Round]]:
    """Side -> its rounds, the sections' round last; a side that fails has none.

    "saving" is one more round of ours, with a checkpoint in it.
    """
    commands = {"ours": our_command(case, threads)}
    if checkout is not None:
        commands["peer"] = peer_command(case, Path(checkout), threads)
    found: dict[str, list[Round]] = {name: [] for name in commands}
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for number in range(rounds + 1):
            for name in list(commands):
                try:
                    if name not in sides:
                        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench"))
                        sides[name] = Side(
                            commands[name], Path(directory), eager=not case.is_compiled(name)
                        )
                        stack.callback(sides[name].close)
                        sides[name].run(steps)  # warm-up
                    how = "run" if number < rounds else "sections"
                    found[name].append(sides[name].run(steps, how))
                    if how == "sections" and name == "ours":
                        found["saving"] = [sides[name].run(steps, "save")]
                except SideFailed as error:
                    print(f"{name} {error}", flush=True)
                    found[name] = []
                    del commands[name]
    return found


def our_command(case: Case, threads: int) -> list[str]:
    """Our side; it works in the directory where it is started."""
    tree = dataclasses.asdict(case) | {"threads": threads}
    return [str(HERE / "our_train.py"), json.dumps(tree), "."]


def peer_command(case: Case, checkout: Path, threads: int) -> list[str]:
    """nanochat's script, with nothing but training steps."""
    arguments: dict[str, str | int] = {
        "device-type": case.device,
        "depth": case.depth,
        "max-seq-len": case.sequence_len,
        "device-batch-size": case.rows,
        "total-batch-size": case.tokens,
        "num-iterations": 10**6,
        "eval-every": -1,
        "core-metric-every": -1,
        "sample-every": -1,
    }
    if case.width is not None:
        arguments["aspect-ratio"] = case.width // case.depth
    if case.window_pattern is not None:
        arguments["window-pattern"] = case.window_pattern
    words = [f"--{name}={value}" for name, value in arguments.items()]
    if case.precision == "fp8":
        words.append("--fp8")
    tree = {
        "checkout": str(checkout.resolve()),
        "arguments": words,
        "threads": threads,
        "seed": 42,
        "case": dataclasses.asdict(case),
    }
    return [str(HERE / "peer_train.py"), json.dumps(tree)]


def table(case: Case, rounds: dict[str, list[Round]]) -> Iterator[str]:
    """A line for each side that came through, and the ratio of both."""
    speeds = {name: speed(case, rounds[name][:-1]) for name in SIDES if rounds.get(name)}
    yield f"{'':<6}{'tokens/s':>10}{'per CPU s':>10}{'GB':>7}{'ms/step':>9}  a step"
    for name, tokens_per_second in speeds.items():
        *timed, split = rounds[name]
        per_cpu = statistics.median(tokens_of(case, r) / r["cpu_seconds"] for r in timed)
        peak = max(r["peak_bytes"] for r in timed) / 1e9
        step = 1000 * case.tokens / tokens_per_second
        yield (
            f"{name:<6}{tokens_per_second:>10,.0f}{per_cpu:>10,.0f}"
            f"{peak:>7.2f}{step:>9,.0f}  {shares(split)}"
        )
    if saving := rounds.get("saving"):
        split = rounds["ours"][-1]
        held = saving[0]["sections"]["checkpoint"] - split["sections"]["checkpoint"]
        longer = saving[0]["seconds"] - split["seconds"]
        yield (
            f"a checkpoint holds a step for {held:.2f} s, {held / 60:.2%} at one a minute; "
            f"{longer:+.2f} s with what writing takes from the steps beside it"
        )
    if len(speeds) == 2:
        cpu = [statistics.median(r["cpu_seconds"] for r in rounds[n][:-1]) for n in speeds]
        yield f"ours / peer: {speeds['ours'] / speeds['peer']:.2f}, of CPU s {cpu[1] / cpu[0]:.2f}"


def tokens_of(case: Case, measured: Round) -> int:
    """Tokens in a round."""
    return case.tokens * measured["steps"]


def speed(case: Case, rounds: Sequence[Round]) -> float:
    """Median over rounds of tokens per second."""
    return statistics.median(tokens_of(case, r) / r["seconds"] for r in rounds)


def shares(split: Round) -> str:
    """Milliseconds of a step by section, the longest first."""
    sections = sorted(split["sections"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {1000 * s / split['steps']:,.0f}" for name, s in sections)


def find_failures(results: Sequence[dict[str, Any]], *, at_least: float) -> list[str]:
    """One line for each case in which we were too slow."""
    lines: list[str] = []
    for result in results:
        case, rounds = Case(**result["case"]), result["rounds"]
        if not rounds["ours"]:
            lines.append(f"{case.title}: ours failed")
        elif rounds.get("peer"):
            ratio = speed(case, rounds["ours"][:-1]) / speed(case, rounds["peer"][:-1])
            if ratio < at_least:
                lines.append(f"{case.title}: {ratio:.2f} times the peer, {at_least} is wanted")
    return lines


def describe_machine(threads: int) -> str:
    """What the figures depend on."""
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {threads} threads a side, "
        f"torch {version('torch')}, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
