"""A pipeline of toy stages in a temporary repository: real jobs, no torch."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.building.build import BuildContext
from flows.profiles import open_profile
from flows.render.text import ago
from flows.stages import Stage
from infra.placement import Placement
from infra.storage.base import Store
from infra.storage.open import open_store
from tests.support.flows.house import House, make_house
from tests.support.flows.shelf import Counting
from tests.support.flows.terminal import Terminal
from tests.support.small_job import one_thread
from tests.support.transcripts import Transcript

DAYS_OF_RECORDS = ("2026-11-20T", "2026-11-21T", "2026-11-22T")
AFTERNOON = 1_795_275_000.0  # 2026-11-21, 15:30 UTC

# Writes its inputs' values and its own name; a file named after the stage in HOME/broken makes it
# fail.
ENTRY = """
from nanochat_core.runtime.progress import Progress


def run(job):
    if (job.directory.parents[2] / "broken" / job.stage).exists():
        raise ValueError("broken")
    values = [(path / "value.txt").read_text() for path in job.inputs.values()]
    progress = Progress(job.events)
    progress.start(2)
    progress.step(1, loss=0.5)
    progress.step(2, loss=0.25)
    text = "+".join([*values, job.stage])
    (job.output / "value.txt").write_text(text)
    return {"length": len(text)}
"""
# `save(job, step, total)` commits a checkpoint of one rank, as training does.
SAVE = """
import hashlib
import json
import time

from nanochat_core.runtime.progress import Progress


def save(job, step, total):
    directory = job.checkpoints / f"step-{step:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    data = f"state after {step}".encode()
    (directory / "tensors.safetensors").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    commit = {"format": 2, "step": step, "total": total, "files": {"tensors.safetensors": entry}}
    (directory / "COMMIT.json").write_text(json.dumps({**commit, "state": {}}))


"""


@dataclass
class Toys:
    """A repository of toy stages, a home with a store, and the events of each stage."""

    root: Path
    home: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def stage(self, name: str, *inputs: Stage, compute: Any = "cpu", source: str = ENTRY) -> Stage:
        """A stage whose entry module has the given source."""
        (self.root / "tasks" / f"toy_{name}.py").write_text(source)
        return Stage(
            name=name,
            makes="a toy",
            inputs=inputs,
            config=("seed",),
            entry=f"tasks.toy_{name}",
            compute=compute,
        )

    @property
    def placement(self) -> Placement:
        """One process on this machine."""
        return Placement(
            home=self.home,
            store=(self.home / "store").as_uri(),
            gpus=0,
            resources=one_thread(save_every_seconds=60.0, dollars_per_hour=3.6),
        )

    def context(self, run_id: str = "toy-1", *, strict: bool = True) -> BuildContext:
        """Where the toys are built."""
        return BuildContext(
            run=open_profile("tiny").run,
            run_id=run_id,
            placement=self.placement,
            store=open_store(self.placement.store),
            watch=lambda stage, event: self.events.append((stage, event)),
            strict=strict,
            root=self.root,
        )

    def kinds(self, stage: str) -> list[str]:
        """Return the kinds of events of a stage, and forget the events."""
        kinds = [event["kind"] for name, event in self.events if name == stage]
        self.events = [(name, event) for name, event in self.events if name != stage]
        return kinds

    def set_broken(self, stage: str, broken: bool = True) -> None:
        """Whether the stage fails."""
        path = self.home / "broken" / stage
        path.parent.mkdir(exist_ok=True)
        path.touch() if broken else path.unlink()


@pytest.fixture(scope="session")
def make_toys() -> Callable[[Path], Toys]:
    """Toys under a directory."""

    def make(directory: Path) -> Toys:
        root, home = directory / "root", directory / "home"
        (root / "tasks").mkdir(parents=True)  # fingerprints see the code of our packages only
        (root / "tasks" / "__init__.py").touch()
        home.mkdir()
        return Toys(root=root, home=home)

    return make


@pytest.fixture
def toys(make_toys: Callable[[Path], Toys], tmp_path: Path) -> Toys:
    """Toys in the test's own directory."""
    return make_toys(tmp_path)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


@pytest.fixture
def full_house(built: House, tmp_path: Path) -> House:
    """A house of one's own with every stage built."""
    house = make_house(tmp_path)
    shutil.copytree(built.root.parent / "store", tmp_path / "store")
    return house


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A house with every stage built. Tests only look at it."""
    house = make_house(tmp_path_factory.mktemp("built"))
    house.build()
    return house


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The default store of a fresh home, which is the default home."""
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "home"))
    for name in ("NANOCHAT_STORE", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return open_store((tmp_path / "home" / "store").as_uri())


@pytest.fixture
def counted(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The default store as commands open it, which counts what they ask."""
    found = Counting(tmp_path / "home" / "store")
    monkeypatch.setattr("flows.cli.options.open_store", lambda url: found)
    return found


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that takes what happens while a run is followed: an action at each poll."""

    def follow(*actions: Callable[[], object]) -> None:
        left = iter(actions)
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(left)())
        monkeypatch.setattr("flows.cli.train.logs.time", clock)

    return follow


def nothing() -> None:
    """Let a poll find nothing new."""


@pytest.fixture
def terminal(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    transcript: Transcript,
    monkeypatch: pytest.MonkeyPatch,
) -> Terminal:
    """The command line in that home, in the afternoon of the day of the records of tests."""

    def since(stamp: str, now: float) -> str:
        return ago(stamp, AFTERNOON if stamp.startswith(DAYS_OF_RECORDS) else now)

    monkeypatch.setattr("flows.cli.output.ago", since)
    return Terminal(capsys, transcript)
