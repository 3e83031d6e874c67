"""What stages open decides their fingerprints: found by running them, not by following imports.

Every stage of a small run is built by real workers, from a copy of the packages. An audit hook that
knows nothing of fingerprints lists each file of the copy that a worker's processes open: the code
of the stage's fingerprint has to have each of them.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flows.building.build import BuildContext, build
from flows.identity.fingerprint import CARRIERS, REPOSITORY, Code, canonical_config, code_of
from flows.identity.manifest import Manifest
from flows.profiles import Profile, make_placement, open_profile
from flows.stages import STAGES
from infra.storage.open import open_store
from nanochat_core.engine.native.build import unable_here
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


@dataclass(frozen=True)
class World:
    """A copy of the packages, and what each stage of a run opened of it."""

    root: Path
    profile: Profile
    opened: dict[str, set[str]]

    def find_escapes(self) -> list[str]:
        """Return each stage and file that it opened and its fingerprint does not have."""
        code, escapes = Code(self.root), list[str]()
        for stage in STAGES:
            config = canonical_config(stage, self.profile.run)
            known = {*code_of(stage, config, code=code), *EXEMPT}
            found = {_name_of(file) for file in self.opened[stage.name]}
            escapes += [f"{stage.name}: {name}" for name in sorted(found - known)]
        return escapes


def _name_of(file: str) -> str:
    """Return the name that a closure has for a file: of a module the dotted one."""
    if not file.endswith(".py"):
        return file
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


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


def _build(context: BuildContext, log: Path) -> dict[str, set[str]]:
    """Build every stage and return the files of ours that its worker opened."""
    opened: dict[str, set[str]] = {}
    made: dict[str, Manifest] = {}
    for stage in STAGES:
        log.write_bytes(b"")
        inputs = {source.name: made[source.name] for source in stage.inputs}
        made[stage.name] = build(stage, context, inputs, force=False).manifest
        opened[stage.name] = set(log.read_text().splitlines())
    return opened


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("oracle")
    root = copy_packages(directory / "root")
    for folder in ("hook", "text", "home"):
        (directory / folder).mkdir()
    (directory / "hook" / "sitecustomize.py").write_text(HOOK)
    for number, path in enumerate(sorted((REPOSITORY / "docs").rglob("*.md"))):
        shutil.copy(path, directory / "text" / f"{number}.txt")
    profile = _open(directory / "text")
    home, log = directory / "home", directory / "opened"
    placement = make_placement(profile.pace, home=home, gpus=0, settings=small.PLACE)
    placement = replace(placement, store=(home / "store").as_uri())
    context = BuildContext(
        run=profile.run,
        run_id="oracle",
        placement=placement,
        store=open_store(placement.store),
        watch=lambda stage, event: None,
        strict=True,
        root=root,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory / "hook"))
        patch.setenv("ORACLE_ROOT", str(root))
        patch.setenv("ORACLE_LOG", str(log))
        return World(root, profile, _build(context, log))


def test_every_file_that_a_stage_opens_decides_its_fingerprint(world):
    assert world.find_escapes() == []


def test_the_oracle_sees_what_stages_are_known_to_open(world):
    for stage in STAGES:
        assert f"{stage.entry.replace('.', '/')}.py" in world.opened[stage.name]
    assert "tasks/generated/words.txt" in world.opened["task_data"]
    assert "nanochat_core/model/gpt.py" in world.opened["pretrain"]
    if unable_here() is None:
        assert "nanochat_core/engine/native/kernels_sample.h" in world.opened["base_eval"]


def test_what_is_exempt_is_what_fingerprints_leave_out():
    assert set(EXEMPT) == set(CARRIERS)


def test_the_oracle_finds_a_data_file_whose_name_is_put_together(world):
    path = world.root / "tasks/generated/spelling.py"
    source = path.read_text()
    path.write_text(source.replace('"words.txt"', '"words" + ".txt"'))
    assert "task_data: tasks/generated/words.txt" in world.find_escapes()
    path.write_text(source)
