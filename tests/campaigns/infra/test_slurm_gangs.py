"""A stage that a run requests from a real Slurm of two nodes.

Figures are in docs/verification/clusters.md.

.venv/bin/python -m pytest -q -s tests/campaigns/infra/test_slurm_gangs.py
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.building import gangs
from flows.building.gangs import build_on_gang, gang_name
from flows.building.stage_request import StageRequest
from flows.identity.fingerprint import REPOSITORY, Code
from flows.identity.manifest import identify_from
from flows.leases.lease import find_holder
from flows.profiles import open_profile
from flows.stages import PRETRAIN
from infra.gangs.slurm import Slurm
from infra.storage.open import open_store
from tests.support.flows.waiting import wait_until
from tests.support.infra.slurm import run, slurm_cluster, why_not
from tests.support.reliability.two_hosts import SAVE_EVERY, look, overrides, reference, seed

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or ""),
]
STEPS = 1200  # half a minute on an idle machine: a cancellation must find it training
SECONDS = 400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as configuration:
        yield configuration


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the same job with two ranks on one machine."""
    return reference(tmp_path_factory.mktemp("whole"), STEPS)


@pytest.fixture(autouse=True)
def login_node(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker that may submit jobs; both nodes are on this machine."""
    for name, value in {
        "SLURM_CONF": str(cluster),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NANOCHAT_HOME": str(tmp_path / "home"),
        "PET_MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gangs, "SLOW_SECONDS", 0.5)


class Caller:
    """A run that requests `pretrain` on two nodes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.store = open_store((directory / "store").as_uri())
        inputs = seed(self.store, directory)
        sources = {source.name: inputs[source.name] for source in PRETRAIN.inputs}
        chosen = open_profile("tiny", depth=2, overrides=overrides(STEPS)).run
        identity = identify_from(PRETRAIN, chosen, sources, code=Code(REPOSITORY))
        self.request = StageRequest(
            stage="pretrain",
            fingerprint=identity.fingerprint,
            inputs=tuple(manifest.ref.prefix for manifest in sources.values()),
            profile="tiny",
            depth=2,
            overrides=overrides(STEPS),
            run="caller",
            store=self.store.url,
            nodes=2,
            gpus=0,
            place=("threads=1", "device_batch_size=4", f"save_every_steps={SAVE_EVERY}"),
        )
        self.lines: list[str] = []
        self.slurm = Slurm(directory / "logs")
        self.stops = False  # the next line ends the call

    def build(self, *, is_cancelled: bool = False) -> Any:
        return build_on_gang(
            self.request, self.slurm, watch=self._watch, is_cancelled=lambda: is_cancelled
        )

    def _watch(self, stage: str, event: Any) -> None:
        self.lines.append(str(event.get("text", event["kind"])))
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt

    @property
    def job(self) -> str | None:
        return self.slurm.find(gang_name(self.request))

    def wait_for_checkpoint(self) -> str:
        """Return the job once it has stored a checkpoint and trains on."""
        wait_until(lambda: look(self.store).get("step", 0) >= SAVE_EVERY, seconds=SECONDS)
        assert self.job is not None, self.lines
        return self.job


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path / "caller")


def field_of(job: str, name: str) -> str:
    """Return a field of `scontrol show job`."""
    words = run("scontrol", "--oneliner", "show", "job", job).split()
    return next(word for word in words if word.startswith(f"{name}=")).partition("=")[2]


def processes_of(job: str, node: str) -> list[psutil.Process]:
    """Return what a job's step runs on a node."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["environ"]):
        values = process.info["environ"] or {}
        its = (values.get("SLURM_JOB_ID"), values.get("SLURM_NODEID"))
        if its == (job, node) and "SLURM_STEP_ID" in values:
            found.append(process)
    return found


def test_a_gang_of_two_nodes_makes_what_one_machine_makes(
    caller: Caller, whole: dict[str, str]
) -> None:
    began = time.monotonic()
    built = caller.build()
    print(f"two nodes: {time.monotonic() - began:.0f} s")
    assert {file.path: file.sha256 for file in built.manifest.files} == whole
    assert [s["nodes"] for s in built.manifest.provenance.segments] == [2]
    assert any("Slurm job" in line for line in caller.lines)
    assert any("0: " in line and "pretrain" in line for line in caller.lines)  # the gang's own
    assert caller.build().cached


def test_a_node_that_is_killed_is_restarted_by_slurm_and_nothing_changes(
    caller: Caller, whole: dict[str, str]
) -> None:
    with ThreadPoolExecutor() as pool:
        building = pool.submit(caller.build)
        job = caller.wait_for_checkpoint()
        lost = time.monotonic()
        for process in processes_of(job, "1"):
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: field_of(job, "Restarts") == "1", seconds=SECONDS)
        wait_until(lambda: field_of(job, "JobState") == "RUNNING", seconds=SECONDS)
        print(f"killed: running again after {time.monotonic() - lost:.0f} s")
        built = building.result()
    assert {file.path: file.sha256 for file in built.manifest.files} == whole
    _, second = built.manifest.provenance.segments
    assert second["first_step"] >= SAVE_EVERY
    assert any(line.startswith("queued: PENDING") for line in caller.lines)


def test_cancel_saves_and_a_caller_that_is_only_stopped_leaves_the_gang_alone(
    caller: Caller, whole: dict[str, str]
) -> None:
    with ThreadPoolExecutor() as pool:
        building = pool.submit(caller.build)
        job = caller.wait_for_checkpoint()
        caller.stops = True
        with pytest.raises(KeyboardInterrupt):
            building.result()
        assert caller.job == job
        again = pool.submit(caller.build, is_cancelled=True)  # finds it
        wait_until(lambda: sum(f"Slurm job {job}:" in line for line in caller.lines) == 2)
        caller.stops, cancelled_at = True, time.time()
        with pytest.raises(KeyboardInterrupt):
            again.result()
        began = time.monotonic()
        wait_until(lambda: field_of(job, "JobState") == "CANCELLED")
        print(f"cancelled: gone after {time.monotonic() - began:.0f} s")
    assert caller.job is None
    assert find_holder(caller.store, caller.request.ref) is None
    # Saved at the cancellation: by its time, as its step may happen to be one that was due.
    commits = [entry for entry in caller.store.list("pretrain/") if "COMMIT" in entry.key]
    assert max(entry.modified for entry in commits) > cancelled_at
    built = caller.build()
    assert {file.path: file.sha256 for file in built.manifest.files} == whole
    assert len(built.manifest.provenance.segments) == 2
