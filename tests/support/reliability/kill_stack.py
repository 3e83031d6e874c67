"""kill -9 of the parts of a deployed flow, one at a time, at random moments, again and again.

Each flow runs as a person starts it, with its GPU stages on the pool gpu, and has to complete
without help. Its artifacts are compared with those of an undisturbed flow.
"""

import contextlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.campaigns.end_to_end.small import form_values
from tests.support.deployments.prefect_api import wait_until
from tests.support.infra.stack.live import LiveStack, kill

Victim = Literal["job", "stage", "flow", "worker cpu", "worker gpu", "server"]
# Of a hundred kills. A dead worker costs two minutes, in which its runs are found to be silent.
WEIGHTS: dict[Victim, int] = {
    "job": 30,
    "stage": 20,
    "flow": 20,
    "server": 18,
    "worker gpu": 6,
    "worker cpu": 6,
}
# Those in a row of one flow; what is killed more often than this is given up on purpose.
KILLS_A_FLOW = 8
KEPT = ("shards", "task_data", "tokenizer", "tokens", "rows")  # of the undisturbed flow
SHOWS_CLOCKS = ("report",)
COMPARED = 13  # stages: all but that one
RETRIES = 20  # of a stage: half of the kills may meet the same one
SECONDS_BETWEEN = (1.0, 6.0)  # from the run's moving again to the next kill
SECONDS_TO_MOVE = 400.0
SECONDS_FOR_A_FLOW = 1800.0
SECONDS_CRASHED = 180.0  # a crashed run that was not resumed after so long stays so
# A job that reports progress so long after a kill, or lives for so long, was not stopped by it.
SECONDS_TO_REPORT = 5.0
SECONDS_SURVIVED = 20.0
SETTINGS = {
    "pretrain__num_steps": 300,
    "midtrain__total_batch_size": 512,
    "sft__total_batch_size": 512,
    "rl__num_steps": 6,
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One victim, and what came of it."""

    flow: int
    victim: Victim
    during: str  # stages whose job was running
    seconds: float | None  # until the run moved again; None: it never did
    server: float | None  # until the server answered again, where it was the victim


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One run of the whole flow, and how it ended."""

    number: int
    kills: int
    state: str
    run_count: int
    seconds: float
    different: list[str]  # stages whose artifact is another than the undisturbed flow's
    orphans: list[str]
    message: str = ""


@dataclass
class Kills:
    """Flows on one stack, and what was found so far, which is printed too."""

    stack: LiveStack
    moments: random.Random
    expected: dict[str, str] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)

    def run(self, kills: int) -> None:
        """An undisturbed flow unless there is one, then others, until so many kills were made."""
        if len(digests(self.store(0))) < COMPARED:
            undisturbed = self.flow(0, kills=0)
            assert undisturbed.state == "Completed", undisturbed
        self.expected = digests(self.store(0))
        while (left := kills - len(self.kills)) > 0:
            number = len(list(self.store(0).parent.iterdir()))
            for stage in KEPT:
                shutil.copytree(self.store(0) / stage, self.store(number) / stage)
            self.flow(number, kills=min(KILLS_A_FLOW, left))

    def store(self, number: int) -> Path:
        """Where a flow's artifacts go."""
        return self.stack.home / "stores" / str(number)

    def flow(self, number: int, *, kills: int) -> Flow:
        """One flow to its end, disturbed so often."""
        began = time.monotonic()
        run = self.start(number)
        made = 0
        while made < kills and not self._is_over(run):
            time.sleep(self.moments.uniform(*SECONDS_BETWEEN))
            made += self._kill_something(run, number)
        found = self._wait_for_end(run)
        actual = digests(self.store(number))
        different = [s for s in self.expected if actual.get(s) != self.expected[s]]
        self.flows.append(
            Flow(
                number=number,
                kills=made,
                state=found["state_name"],
                run_count=found["run_count"],
                seconds=round(time.monotonic() - began, 1),
                different=different,
                orphans=self._orphans(),
                message=""
                if found["state_type"] == "COMPLETED"
                else str(found["state"]["message"]),
            )
        )
        print(self.flows[-1], flush=True)  # noqa: T201 - a campaign shows how far it is
        return self.flows[-1]

    def start(self, number: int) -> str:
        """A flow started with the form; gives its run's id."""
        self.store(number).mkdir(parents=True, exist_ok=True)
        deployment = self.stack.api.deployment("nanochat/nanochat")
        values = form_values(
            run_name=f"kills-{number}", store=self.store(number).as_uri(), **SETTINGS
        )
        values["place"] = [*values["place"], "save_every_seconds=2"]
        values["retries"] = RETRIES
        run = self.stack.api.trigger(deployment, values)
        wait_until(lambda: self.stack.engines(run), seconds=120, what="the flow's process")
        return run

    def _kill_something(self, run: str, number: int) -> int:
        """1, or 0 when the run was over before."""
        (wanted,) = self.moments.choices(list(WEIGHTS), list(WEIGHTS.values()))
        looked = time.monotonic()
        while not (found := self.find(wanted, run)):
            if self._is_over(run):
                return 0
            if time.monotonic() - looked > 30:  # there is none of them now
                (wanted,) = self.moments.choices(list(WEIGHTS), list(WEIGHTS.values()))
                looked = time.monotonic()
            time.sleep(0.1)
        jobs = self.stack.processes("job")
        during = sorted({_stage_of(job) for job in jobs})
        victim = self.moments.choice(found)
        moment = time.time()
        if not kill(victim):
            return 0
        survivors = [job for job in jobs if job.pid != victim.pid]
        seconds = self._seconds_to_move(run, number, moment, survivors)
        self.kills.append(
            Kill(
                flow=number,
                victim=wanted,
                during="+".join(during) or "between jobs",
                seconds=None if seconds is None else round(seconds, 1),
                server=round(self._seconds_to_answer(moment), 1) if wanted == "server" else None,
            )
        )
        print(self.kills[-1], flush=True)  # noqa: T201
        return 1

    def find(self, victim: Victim, run: str) -> list[psutil.Process]:
        """Processes of that part that live now."""
        stack = self.stack
        find: dict[Victim, Callable[[], list[psutil.Process]]] = {
            "job": lambda: stack.processes("job"),
            "stage": lambda: [p for p in stack.processes("flow") if p not in stack.engines(run)],
            "flow": lambda: stack.engines(run),
            "worker cpu": lambda: stack.workers_of("cpu"),
            "worker gpu": lambda: stack.workers_of("gpu"),
            "server": lambda: stack.processes("server"),
        }
        return find[victim]()

    def _seconds_to_move(
        self, run: str, number: int, moment: float, survivors: list[psutil.Process]
    ) -> float | None:
        """From the kill to a new job, a new artifact or the end; 0 when a job never stopped."""
        deadline = time.monotonic() + SECONDS_TO_MOVE
        while time.monotonic() < deadline:
            for job in self.stack.processes("job"):
                with contextlib.suppress(psutil.Error):
                    if job.create_time() > moment:
                        return job.create_time() - moment
            for manifest in self.store(number).glob("*/*/manifest.json"):
                if manifest.stem and (made := manifest.stat().st_mtime) > moment:
                    return made - moment
            if any(_went_on(job, moment) for job in survivors):
                return 0.0
            if time.time() - moment > SECONDS_TO_REPORT and self._is_over(run):
                return time.time() - moment
            time.sleep(0.1)
        return None

    def _seconds_to_answer(self, moment: float) -> float:
        wait_until(self.stack.api.answers, seconds=300, what="the server to answer")
        return time.time() - moment

    def _is_over(self, run: str) -> bool:
        """A crashed run is not: it is to be resumed."""
        return self.stack.api.run(run)["state_type"] in ("COMPLETED", "FAILED", "CANCELLED")

    def _wait_for_end(self, run: str) -> dict[str, Any]:
        """The run at its end: completed, failed, or crashed for longer than a resumption takes."""
        deadline = time.monotonic() + SECONDS_FOR_A_FLOW
        crashed: float | None = None
        while not self._is_over(run) and time.monotonic() < deadline:
            is_crashed = self.stack.api.run(run)["state_type"] == "CRASHED"
            crashed = (crashed or time.monotonic()) if is_crashed else None
            if crashed and time.monotonic() - crashed > SECONDS_CRASHED:
                break
            time.sleep(0.5)
        return self.stack.api.run(run)

    def _orphans(self) -> list[str]:
        """Jobs and flows that outlive their run."""
        left: list[psutil.Process] = []

        def are_gone() -> bool:
            left[:] = self.stack.processes("job", "agent", "flow")
            return not left

        with contextlib.suppress(AssertionError):
            wait_until(are_gone, seconds=45)
        return [f"{p.pid} {_stage_of(p)}" for p in left]


def digests(store: Path) -> dict[str, str]:
    """Stage -> digest of its only artifact; without what shows how long things took."""
    found: dict[str, str] = {}
    for path in sorted(store.glob("*/*/manifest.json")):
        stage = path.parent.parent.name
        assert stage not in found, f"two artifacts of {stage}"
        found[stage] = json.loads(path.read_text(encoding="utf-8"))["digest"]
    return {stage: digest for stage, digest in found.items() if stage not in SHOWS_CLOCKS}


def _went_on(job: psutil.Process, moment: float) -> bool:
    """Whether the job was not stopped by what happened at that moment."""
    with contextlib.suppress(psutil.Error, OSError, IndexError):
        if not job.is_running() or job.status() == psutil.STATUS_ZOMBIE:
            return False
        reported = Path(job.cmdline()[-1]).with_name("events.jsonl").stat().st_mtime
        return reported > moment + SECONDS_TO_REPORT or time.time() > moment + SECONDS_SURVIVED
    return False


def _stage_of(process: psutil.Process) -> str:
    """Of a job, whose last word is HOME/work/STAGE/FINGERPRINT/job.json."""
    with contextlib.suppress(psutil.Error, IndexError):
        return Path(process.cmdline()[-1]).parent.parent.name or "?"
    return "?"
