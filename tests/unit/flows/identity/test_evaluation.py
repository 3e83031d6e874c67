"""An evaluation is identified by its model and its questions; no other change runs it again."""

import dataclasses

import pytest

from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.profiles import open_profile
from flows.stages import BASE_EVAL, CHAT_EVALS, Stage

CODE = Code(REPOSITORY)
RUN = open_profile("d12").run


def fingerprint(stage: Stage, *overrides: str, **digests: str) -> str:
    inputs = {source.name: "1" * 64 for source in stage.inputs} | digests
    run = open_profile("d12", overrides=overrides).run
    return identify(stage, run, inputs, code=CODE).fingerprint


@pytest.mark.parametrize("stage", [BASE_EVAL, *CHAT_EVALS], ids=lambda stage: stage.name)
def test_it_is_the_model_the_questions_and_its_own_settings(stage):
    same = fingerprint(stage)
    for name in (field.name for field in dataclasses.fields(RUN)):
        if name in ("seed", "pretrain", "sft", "rl", "optimizer"):
            assert name not in stage.config
    assert fingerprint(stage, "seed=7", "pretrain.num_steps=3", "rl.num_steps=1") == same
    assert stage.config == (stage.name.split("_eval")[0] + "_eval",)
    model, *_, questions = stage.inputs
    assert questions.name == "task_data"
    changed = [fingerprint(stage, **{i.name: "2" * 64}) for i in (model, questions)]
    assert len({same, *changed}) == 3


def test_other_questions_are_another_evaluation():
    assert fingerprint(BASE_EVAL, "base_eval.core_max_per_task=100") != fingerprint(BASE_EVAL)
    assert fingerprint(BASE_EVAL, "base_eval.core_max_per_task=null") == fingerprint(BASE_EVAL)
    assert fingerprint(CHAT_EVALS[0], "chat_eval.tasks=[]") != fingerprint(CHAT_EVALS[0])
