"""The command on the report card: what it says is what was asked for, to the last digit."""

import dataclasses
import json
import shlex

import pytest

from flows.identity.fingerprint import canonical_config
from flows.identity.manifest import Manifest
from flows.profiles import PROFILES, open_profile
from flows.report.command import Reproduction, reproduction_of
from flows.stages import PRETRAIN, REPORT, SFT
from nanochat_core.config import RunConfig
from tests.support.flows.reported import make_inputs, run_report
from tests.support.flows.shelf import make_manifest

MIXTURE = '[{"task":"identity","num_examples":60,"epochs":4}]'


def manifests_of(run: RunConfig) -> list[Manifest]:
    return [make_manifest(s.name, config=canonical_config(s, run)) for s in REPORT.inputs]


def run_again(found: Reproduction) -> RunConfig:
    """What the command would run."""
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[:2] == ["nanochat", "run"]
    profile, *rest = words[2:]
    options = list(zip(rest[::2], rest[1::2], strict=True))
    assert {name for name, _ in options} <= {"--depth", "--set"}
    depth = next((int(value) for name, value in options if name == "--depth"), None)
    sets = [value for name, value in options if name == "--set"]
    return open_profile(profile, depth=depth, overrides=sets).run


OVERRIDES = (
    (),
    ("seed=7", "pretrain.schedule.warmup_steps=3", "optimizer.muon_lr=1e-05"),
    (f"sft.mixture={MIXTURE}", "optimizer.grad_clip=1.0", "rl.baseline=leave_one_out"),
    ("shards.revision=a 'b'", 'base_eval.prompts=["it\'s", "\\u00e9"]'),
)


@pytest.mark.parametrize(
    ("profile", "depth", "overrides"),
    [(name, 8, OVERRIDES[1]) for name in PROFILES]
    + [("tiny", depth, overrides) for depth in (None, 8) for overrides in OVERRIDES],
)
def test_the_command_asks_for_the_same_settings(profile, depth, overrides):
    run = open_profile(profile, depth=depth, overrides=overrides).run
    found = reproduction_of(manifests_of(run))
    assert run_again(found) == run
    assert found == reproduction_of(manifests_of(run))


def test_what_the_profile_says_is_not_repeated():
    for name in PROFILES:
        found = reproduction_of(manifests_of(open_profile(name).run))
        assert found.command == f"nanochat run {name}"
    run = open_profile("tiny", depth=2, overrides=["seed=7"]).run
    expected = "nanochat run tiny --depth 2 \\\n    --set seed=7"
    assert reproduction_of(manifests_of(run)).command == expected


def test_the_version_of_another_machine_is_reported_and_not_set():
    run = open_profile("tiny").run
    shards = dataclasses.replace(run.shards, snapshot=("python==3.99.1",))
    found = reproduction_of(manifests_of(dataclasses.replace(run, shards=shards)))
    assert found.command == "nanochat run tiny"
    assert found.notes == ("trained on the docs of Python 3.99.1; other versions give other data",)
    assert found.digest != reproduction_of(manifests_of(run)).digest


def test_a_file_of_ones_own_is_named_by_what_it_held(tmp_path):
    path = tmp_path / "mine.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps(talk) + "\n")
    datasets = [d.tree() for d in open_profile("tiny").run.task_data.datasets]
    datasets.append({**datasets[0], "name": "mine", "path": str(path), "num_test": 0})
    asked = f"task_data.datasets={json.dumps(datasets)}"
    run = open_profile("tiny", overrides=[asked]).run
    found = reproduction_of(manifests_of(run))
    assert str(tmp_path) not in found.command
    assert found.notes[-1].startswith("FILE of the dataset mine has sha256 ")
    filled = dataclasses.replace(found, command=found.command.replace('"FILE"', f'"{path}"'))
    assert run_again(filled) == run


def with_pretrain(**change: object) -> Manifest:
    """Return a base model of tiny that was trained with changed settings; None is none."""
    config = canonical_config(PRETRAIN, open_profile("tiny").run)
    pretrain = {**config["pretrain"], **change}  # pyright: ignore[reportGeneralTypeIssues]
    config["pretrain"] = {k: v for k, v in pretrain.items() if v is not None}
    return make_manifest("pretrain", config=config)


RUN_2 = open_profile("tiny", overrides=["seed=2"]).run
UNREAD = "this version does not read the settings: RunConfig.pretrain"
IMPORTED = make_manifest("pretrain", config={"imported": {"model.safetensors": "0" * 64}})
OTHER_SEED = make_manifest("sft", config=canonical_config(SFT, RUN_2))


@pytest.mark.parametrize(
    ("artifact", "note"),
    [
        (OTHER_SEED, "seed was set in more than one way among the artifacts"),
        (IMPORTED, "pretrain was taken over from elsewhere; nothing says how it came about"),
        (with_pretrain(num_stepz=3), f"{UNREAD} has no setting 'num_stepz'"),
        (with_pretrain(num_steps=None), f"{UNREAD} needs a value for 'num_steps'"),
    ],
)
def test_artifacts_that_no_command_makes_have_a_reason(artifact, note):
    made = manifests_of(open_profile("tiny").run)
    found = reproduction_of([artifact if m.stage == artifact.stage else m for m in made])
    assert (found.command, found.notes) == (None, (note,))


def test_a_card_without_a_command_says_why(ordinary, tmp_path):
    inputs = make_inputs(tmp_path / "other", run=RUN_2)
    # The report reads what each manifest says; that the digests fit is the store's concern.
    odd = {**ordinary, "sft": inputs["sft"]}
    page, text = run_report(tmp_path / "job", odd)
    for document in (page, text):
        assert "No one command makes these artifacts." in document
        assert "seed was set in more than one way" in document
