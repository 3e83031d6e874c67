"""A run that was given no name is called after its profile and what it changes."""

import pytest

from flows.artifacts.runs import point
from flows.overrides import changed_settings, default_name, name_of, open_name, settings_reach
from flows.run_request import RunRequest
from flows.stages import REPORT, SFT, STAGES
from infra.storage.local import LocalStore
from nanochat_core.errors import ConfigError


def test_an_experiment_has_a_name_of_its_own_that_only_its_settings_decide():
    name = default_name(RunRequest(overrides=("seed=7", "rl.temperature=0.5")))
    assert name.startswith("tiny-")
    assert default_name(RunRequest(overrides=("rl.temperature = 5e-1", "seed=7"))) == name
    assert default_name(RunRequest(overrides=("seed=42", "seed=7", "rl.temperature=0.5"))) == name
    others = [("seed=7",), ("seed=8", "rl.temperature=0.5"), ("sft.num_epochs=7",)]
    names = {default_name(RunRequest(overrides=each)) for each in others}
    assert len(names | {name, "tiny"}) == 5


def test_only_what_differs_from_the_profile_is_in_a_name():
    name = default_name(RunRequest(overrides=("seed=7",)))
    for request, expected in (
        (RunRequest(), "tiny"),
        (RunRequest(depth=3, overrides=("seed=42",)), "tiny"),
        (RunRequest(depth=4), "tiny-d4"),
        (RunRequest(depth=4, overrides=("seed=7",)), f"{name}-d4"),
        (RunRequest(until="pretrain"), "tiny-until-pretrain"),
        (RunRequest(depth=4, until="sft"), "tiny-d4-until-sft"),
        (RunRequest(until="report"), "tiny"),
    ):
        assert default_name(request) == name_of(request) == expected


def test_a_run_from_given_artifacts_is_an_experiment():
    given = {
        default_name(RunRequest(use=use))
        for use in (("sft@a",), ("sft@b",), ("sft@a", "rows@a"), ("rows@a", "sft@a"))
    }
    assert len(given) == 3
    assert "tiny" not in given


def test_changed_settings_are_those_that_differ_from_the_profiles():
    overrides = ("seed=42", "sft.num_epochs=2", "shards.path=/data", "task_data.core_bundle=null")
    assert changed_settings(RunRequest(overrides=overrides)) == {
        "sft.num_epochs": 2,
        "shards.path": "/data",
    }


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (RunRequest(run_name="a/b"), "'a/b' cannot be the name of a run"),
        (RunRequest(run_name="d12"), "d12 is the name of another profile"),
        (RunRequest(run_name="main"), "main is a tag"),
        (RunRequest(depth=4), "tiny-d4 is a tag"),  # its default name
    ],
)
def test_a_name_that_would_not_lead_to_the_run_is_refused(tmp_path, request_, error):
    store = LocalStore(tmp_path / "store")
    assert open_name(store, RunRequest(depth=4)) == "tiny-d4"
    for tag in ("main", "tiny-d4"):
        point(store, tag, "tiny-1")
    with pytest.raises(ConfigError, match=error) as caught:
        open_name(store, request_)
    assert caught.value.hint
    for given in ("tiny", "best_2.b"):
        request = RunRequest(run_name=given, depth=4, overrides=("seed=7",))
        assert open_name(store, request) == given


def test_each_changed_setting_is_named_with_the_stages_that_it_reaches(transcript):
    def reaches(*overrides, profile="tiny", depth=None, stages=(*REPORT.inputs, REPORT)):
        request = RunRequest(profile=profile, depth=depth, overrides=overrides)
        found = settings_reach(request, stages)
        words = f"{profile} {' '.join(overrides)} --depth {depth}"
        transcript.check(words, "\n".join(map(str, found)))

    reaches()
    reaches("pretrain.num_steps=50")  # the profile's own value
    reaches("rl.num_steps=7", "pretrain.num_steps=9")
    reaches("seed=7")
    reaches('base_eval.prompts=["Once"]')
    for depth in (3, 5):
        reaches("sft.num_epochs=2", depth=depth)  # compared at that depth
    reaches(profile="d12", depth=14)
    late = STAGES[STAGES.index(SFT) : STAGES.index(REPORT) + 1]
    reaches("pretrain.num_steps=9", "sft.num_epochs=2", stages=late)
