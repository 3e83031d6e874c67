"""How a model is evaluated again: by which stage, on what data, with which settings."""

from typing import Any

import pytest

from flows.evals.suite import EvalRequest, Suite, evaluated_model, history_name
from flows.evals.suite import open_suite as open_requested
from flows.identity.manifest import Manifest
from flows.interop.import_model import IMPORTED
from flows.run_request import RunRequest
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError, ModelError
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


def open_suite(store: Store, model: str, **options: Any) -> Suite:
    """The suite of an evaluation with these options."""
    return open_requested(EvalRequest(model=model, **options), store, warn=print)


def put_main(store: Store, *stages: str, **changes: object) -> dict[str, Manifest]:
    """A run called main that made these stages."""
    made = {stage: put_artifact(store, make_manifest(stage)) for stage in stages}
    put_run(store, "main-1", *made.values(), name="main", **changes)
    return made


def test_a_chat_model_is_evaluated_by_its_own_stage_on_the_data_of_its_run(store):
    made = put_main(store, "task_data", "rows", "pretrain", "sft", overrides=("seed=7",))
    suite = open_suite(store, "main")
    assert suite.stage.name == "chat_eval_sft"
    assert suite.run == RunRequest(
        overrides=("seed=7",),
        use=tuple(made[name].ref.prefix for name in ("sft", "task_data")),
        until="chat_eval_sft",
        run_name="eval-main",
    )


def test_a_base_model_is_evaluated_on_rows_of_its_own_tokenizer(store):
    made = put_main(store, "task_data", "rows", "pretrain")
    suite = open_suite(store, "pretrain@main")
    assert suite.stage.name == "base_eval"
    assert suite.run.until == "base_eval"
    assert set(suite.run.use) == {item.ref.prefix for item in made.values()}
    put_run(store, "other-1", put_artifact(store, make_manifest("pretrain")), name="other")
    with pytest.raises(ArtifactError, match="run other-1 has no rows to evaluate pretrain/"):
        open_suite(store, "pretrain@other")


def test_another_suite_brings_its_own_data(store):
    put_main(store, "task_data", "sft")
    other = open_suite(store, "main", profile="d12")
    assert [name.partition("/")[0] for name in other.run.use] == ["sft"]
    changed = open_suite(store, "main", overrides=("task_data.core_bundle=null",))
    assert [name.partition("/")[0] for name in changed.run.use] == ["sft"]


def test_a_metric_that_is_not_measured_is_refused_before_anything_runs(store):
    put_main(store, "task_data", "rows", "pretrain", "sft")
    chat, base = "sft@main", "pretrain@main"
    for model, name in ((chat, "chatcore"), (chat, "spelling"), (base, "val_bpb"), (base, None)):
        open_suite(store, model, metric=name)
    with pytest.raises(ConfigError, match="chat_eval_sft does not measure 'spellin'") as caught:
        open_suite(store, chat, metric="spellin")
    assert caught.value.hint == "did you mean 'spelling'?"


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("main", {"overrides": ("pretrain.num_steps=1",)}, ConfigError, "does not change how a"),
        ("task_data@main", {}, ModelError, "task_data@main is not a model"),
        ("theirs", {}, ConfigError, "theirs was imported"),
        ("main", {"drop": -0.1}, ConfigError, "drop is -0.1"),
        ("main", {"drop": float("nan")}, ConfigError, "drop is nan"),
        ("main", {"drop": float("inf")}, ConfigError, "drop is inf"),
        ("main", {"against": "worst"}, ConfigError, "against is 'worst'"),
    ],
    ids=str,
)
def test_what_is_no_evaluation_is_refused_with_a_hint(store, model, options, error, message):
    made = put_main(store, "task_data", "sft")
    put_run(store, "theirs-1", made["sft"], name="theirs", profile=IMPORTED)
    with pytest.raises(error, match=message) as caught:
        open_suite(store, model, **options)
    assert caught.value.hint
    assert open_suite(store, "theirs", profile="tiny").run.profile == "tiny"
    open_suite(store, "main", drop=0, against="best")


def test_a_history_is_called_as_the_model_is():
    assert history_name("main") == history_name("sft@main") == "eval-main"
    assert history_name("sft/1a2b3c") == "eval-sft-1a2b3c"


def test_the_status_of_an_evaluation_names_the_command_that_repeats_it(store, terminal):
    made = put_main(store, "task_data", "sft")
    evaluated = put_artifact(store, make_manifest("chat_eval_sft"))
    put_run(store, "eval-main-1", evaluated, name="eval-main", uses=("sft@main",))
    terminal.shows("status eval-main")
    trained = put_run(store, "other-1", name="other", uses=("sft@main",), profile="tiny")
    assert made
    assert evaluated_model(trained) is None
