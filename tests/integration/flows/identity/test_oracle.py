"""What stages open decides their fingerprints: found by running them, not by asking the closure.

Every stage of a small run is built by real workers, from a copy of the packages. An audit hook that
knows nothing of fingerprints lists each file of the copy that a worker's processes open. Then each
of these files is changed, and every stage that opened it must have another fingerprint.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flows.building.build import BuildContext, build
from flows.identity import fingerprint
from flows.identity.fingerprint import REPOSITORY, Code, fingerprint_of, preimage_of
from flows.identity.manifest import Manifest
from flows.profiles import Profile, make_placement, open_profile
from flows.stages import STAGES, stage_named
from infra.storage.open import open_store
from nanochat_core.engine.native.build import unable_here
from nanochat_core.errors import StageError
from tests.campaigns.end_to_end import small
from tests.support.flows.repository import copy_packages

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # fourteen workers, one by one
_TOLD = "says how far the job is, or ends it; nothing of it is in a result"
_STATE = "what a resumed job starts from, equal to the state of one that was not interrupted"
# What fingerprints leave out (CARRIERS), each with the reason.
EXEMPT = {
    "nanochat_core.config": "its values are hashed",
    "nanochat_core.eras": "its values are part of the configuration",
    "nanochat_core.errors": "an error ends the job",
    "nanochat_core.job": "hands over the configuration, which is hashed, and the placement",
    "nanochat_core.runtime.code_record": "records what is loaded",
    "nanochat_core.runtime.hardware.gc_disabled": "when memory is collected",
    "nanochat_core.runtime.heartbeat": _TOLD,
    "nanochat_core.runtime.interrupt": _TOLD,
    "nanochat_core.runtime.metrics": _TOLD,
    "nanochat_core.runtime.hardware.gpu_specs": "the speed of known GPUs, for metrics",
    "nanochat_core.runtime.process_start": _TOLD,
    "nanochat_core.runtime.progress": _TOLD,
    "nanochat_core.runtime.trackers": _TOLD,
    "nanochat_core.runtime.versions": "recorded with the result",
    "nanochat_core.scaling": "its choices are configuration; its counts are reported",
    "nanochat_core.section": "reads and writes configuration",
    "nanochat_core.train.loop.checkpoint": _STATE,
    "nanochat_core.train.loop.checkpointer": _STATE,
    "nanochat_core.train.loop.metrics": _TOLD,
    "nanochat_core.train.loop.run_environment": "the placement, which decides no result",
    "nanochat_core.worker": "starts the stage's own module",
    "tasks.names": "names the modules of tasks, which are hashed where they are loaded",
}

# Runs in every Python that a worker starts. Of bytecode the source counts: it is what was compiled.
HOOK = """
import os, sys

ROOT, LOG = os.environ["ORACLE_ROOT"] + "/", os.environ["ORACLE_LOG"]


def hear(event, args):
    if event == "open" and isinstance(args[0], str) and args[0].startswith(ROOT):
        name = args[0].removeprefix(ROOT)
        folder, _, file = name.rpartition("/__pycache__/")
        if folder:
            name = f"{folder}/{file.partition('.')[0]}.py"
        descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{name}\\n".encode())
        os.close(descriptor)


sys.addaudithook(hear)
"""


ALL = tuple(stage.name for stage in STAGES)


@dataclass(frozen=True)
class World:
    """A copy of the packages, and what each stage opened of it."""

    directory: Path
    profile: Profile
    opened: dict[str, set[str]]
    manifests: dict[str, Manifest]

    @property
    def root(self) -> Path:
        """Where the packages lie."""
        return self.directory / "root"

    def execute(self, name: str, *, strict: bool) -> Iterator[str]:
        """Build a stage and return the files of ours that its worker opened."""
        log = self.directory / "opened"
        log.write_bytes(b"")
        stage = stage_named(name)
        inputs = {source.name: self.manifests[source.name] for source in stage.inputs}
        try:
            self.manifests[name] = build(
                stage, self._context(strict=strict), inputs, force=name in self.manifests
            ).manifest
        finally:
            self.opened[name] = set(log.read_text().splitlines())
        return iter(self.opened[name])

    def fingerprints(self, stages: Iterable[str] = ALL) -> dict[str, str]:
        """Return the stages' fingerprints with the code as it is; they know no inputs."""
        code = Code(self.root, cache=self.directory / "scans.json")
        identities = {n: preimage_of(stage_named(n), self.profile.run, code=code) for n in stages}
        if stages is ALL:
            code.save_cache()  # of the files as they are: each is scanned once, not for each edit
        return {name: fingerprint_of(identity) for name, identity in identities.items()}

    def _context(self, *, strict: bool) -> BuildContext:
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        placement = make_placement(self.profile.pace, home=home, gpus=0, settings=small.PLACE)
        placement = replace(placement, store=(home / "store").as_uri())
        return BuildContext(
            run=self.profile.run,
            run_id="oracle",
            placement=placement,
            store=open_store(placement.store),
            watch=lambda stage, event: None,
            strict=strict,
            root=self.root,
        )


FEWER = {
    "tokenizer.max_chars": 100_000,
    "pretrain.num_steps": 2,
    "pretrain.eval_tokens": 1024,
    "base_eval.eval_tokens": 1024,
    "base_eval.max_new_tokens": 2,
    "rl.num_steps": 1,
    "rl.max_new_tokens": 2,
    "rl.eval_examples": 1,
}


def _open(directory: Path) -> Profile:
    """Tiny, made smaller, of our own documents: reading those of all packages takes 20 s."""
    settings = {**small.SETTINGS, **FEWER, "shards.source": "local", "shards.path": directory}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return open_profile("tiny", depth=small.DEPTH, overrides=overrides)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("oracle")
    copy_packages(directory / "root")
    (directory / "hook").mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(HOOK)
    (directory / "text").mkdir()
    for number, path in enumerate(sorted((REPOSITORY / "docs").rglob("*.md"))):
        shutil.copy(path, directory / "text" / f"{number}.txt")
    world = World(directory, _open(directory / "text"), {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory / "hook"))
        patch.setenv("ORACLE_ROOT", str(world.root))
        patch.setenv("ORACLE_LOG", str(directory / "opened"))
        for stage in STAGES:
            world.execute(stage.name, strict=True)
        yield world


def find_escapes(world: World, files: Iterable[str] | None = None) -> list[str]:
    """Return each file and stage where a change of the file leaves the fingerprint as it is."""
    before = world.fingerprints()
    escapes = []
    for name in sorted(set().union(*world.opened.values()) if files is None else files):
        if _module_of(name) in EXEMPT:
            continue
        stages = [stage for stage, opened in world.opened.items() if name in opened]
        after = _fingerprints_after(world, name, stages)
        escapes += [f"{name}: {stage}" for stage in stages if before[stage] == after[stage]]
    return escapes


def _fingerprints_after(world: World, name: str, stages: Iterable[str]) -> Mapping[str, str]:
    path = world.root / name
    content = path.read_bytes()
    path.write_bytes(_with_other_meaning(path))
    try:
        return world.fingerprints(stages)
    finally:
        path.write_bytes(content)


def _with_other_meaning(path: Path) -> bytes:
    return path.read_bytes() + (b"\n_ORACLE = 1\n" if path.suffix == ".py" else b"\noracle\n")


def _module_of(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


# The tests.


def test_every_file_that_a_stage_opens_decides_its_fingerprint(world):
    assert find_escapes(world) == []


def test_the_oracle_sees_what_stages_are_known_to_open(world):
    assert tuple(world.opened) == ALL
    for stage in STAGES:
        entry = f"{stage.entry.replace('.', '/')}.py"
        assert entry in world.opened[stage.name]
    assert "tasks/generated/words.txt" in world.opened["task_data"]
    assert "nanochat_core/model/gpt.py" in world.opened["pretrain"]
    if unable_here() is None:
        assert "nanochat_core/engine/native/kernels_sample.h" in world.opened["base_eval"]


def test_what_is_exempt_is_what_fingerprints_leave_out():
    assert set(EXEMPT) == set(fingerprint.CARRIERS)


@dataclass(frozen=True)
class Escape:
    """A way around the fingerprint that is put into the copy."""

    file: str  # that is edited
    old: str
    new: str
    finds: str  # the file that the oracle has to name
    stage: str | None = None  # that is run again, because the escape opens something new


ESCAPES = {
    "a data file with a name that is put together": Escape(
        "tasks/generated/spelling.py",
        '"words.txt"',
        '"words" + ".txt"',
        finds="tasks/generated/words.txt",
    ),
    "a module imported by a name that is put together": Escape(
        "nanochat_core/train/tokenizer.py",
        "def run(",
        "import importlib as i\n\ni.import_module('nanochat_core.model.' + 'shape')\n\n\ndef run(",
        finds="nanochat_core/model/shape.py",
        stage="tokenizer",
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_the_oracle_finds_a_planted_escape(world, name):
    escape = ESCAPES[name]
    path = world.root / escape.file
    source = path.read_text()
    assert source.count(escape.old) == 1
    opened = dict(world.opened)
    path.write_text(source.replace(escape.old, escape.new))
    try:
        if escape.stage is not None:
            with pytest.raises(StageError, match="its fingerprint does not see"):
                world.execute(escape.stage, strict=True)
        stages = {stage for stage, files in world.opened.items() if escape.finds in files}
        assert stages
        found = find_escapes(world, [escape.finds])
        assert {line.partition(": ")[0] for line in found} == {escape.finds}
    finally:
        path.write_text(source)
        world.opened.update(opened)
    assert find_escapes(world, [escape.finds]) == []


def test_the_oracle_finds_a_carrier_that_decides(world, monkeypatch):
    carriers = {*fingerprint.CARRIERS, "nanochat_core.model.gpt"}
    monkeypatch.setattr(fingerprint, "CARRIERS", frozenset(carriers))
    assert "nanochat_core/model/gpt.py: pretrain" in find_escapes(
        world, ["nanochat_core/model/gpt.py"]
    )
