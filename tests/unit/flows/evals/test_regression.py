"""When a model counts as worse, and what is said of it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from flows.evals.regression import Evaluation, assess, history_rows, read_history
from flows.evals.suite import EvalRequest
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from nanochat_core.errors import ConfigError
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


@pytest.fixture
def night(store: Store) -> Callable[..., Evaluation]:
    """Return a function that adds an evaluation; `metrics` also distinguish the models."""
    nights = itertools.count(1)

    def add(
        *, suite: str = "a", config: Any = None, status: str = "finished", **metrics: Any
    ) -> Evaluation:
        model = make_manifest("sft", files={"data": repr(metrics)})
        inputs = {"sft": model, "task_data": make_manifest("task_data", files={"data": suite})}
        made = make_manifest("chat_eval_sft", config=config, inputs=inputs, metrics=metrics)
        put_artifact(store, made)
        run = f"eval-main-20261121t0300{next(nights):02d}z-0000"
        return Evaluation(
            run=put_run(store, run, made, name="eval-main", status=status), manifest=made
        )

    return add


def history(store: Store) -> list[Evaluation]:
    return read_history(store, "eval-main", "chat_eval_sft")


TWO = [{"chatcore": 0.9}, {"chatcore": 0.5}]
ANOTHER = [
    {"chatcore": 0.9, "suite": "another"},
    {"chatcore": 0.9, "config": {"max_per_task": 8}},
    {"chatcore": 0.8, "status": "failed"},
]


@pytest.mark.parametrize(
    ("earlier", "tonight", "rule", "regressed", "baseline"),
    [
        ([{"chatcore": 0.5}], {"chatcore": 0.4}, {}, True, 0.5),
        ([{"chatcore": 0.5}], {"chatcore": 0.49}, {}, False, 0.5),
        ([{"chatcore": 0.5}], {"chatcore": 0.4}, {"drop": 0.2}, False, 0.5),
        ([{"chatcore": 0.5}], {"chatcore": 0.5}, {"drop": 0.0}, False, 0.5),
        ([{"chatcore": 0.4}], {"chatcore": 0.5}, {}, False, 0.4),
        ([{"val_bpb": 1.0}], {"val_bpb": 1.1}, {}, True, 1.0),  # less is better
        ([{"val_bpb": 1.1}], {"val_bpb": 1.0}, {}, False, 1.1),
        (TWO, {"chatcore": 0.49}, {"against": "previous"}, False, 0.5),
        (TWO, {"chatcore": 0.49}, {"against": "best"}, True, 0.9),
        ([{"val_bpb": 1.0}, {"val_bpb": 1.1}], {"val_bpb": 1.1}, {"against": "best"}, True, 1.0),
        (ANOTHER, {"chatcore": 0.5}, {}, False, None),
    ],
)
def test_a_loss_beyond_the_allowed_one_is_a_regression(
    store, night, earlier, tonight, rule, regressed, baseline
):
    for before in earlier:
        night(**before)
    verdict = assess(store, night(**tonight), history(store), EvalRequest(**rule))
    assert verdict.regressed is regressed
    assert (verdict.baseline and verdict.baseline.value) == baseline


def test_a_loss_is_reported_once_while_the_model_does_not_change(store, night):
    start, first, second = (
        assess(store, night(chatcore=score), history(store), EvalRequest())
        for score in (0.9, 0.5, 0.5)
    )
    assert start.text == "chatcore 0.9; there is no earlier evaluation to compare it with"
    assert (first.regressed, second.regressed) == (True, False)
    assert second.text == f"chatcore 0.5, as in run {second.baseline_run}"


def test_a_loss_whose_interval_includes_0_is_no_regression(store, night):
    night(chatcore=0.5, chatcore_low=0.3, chatcore_high=0.7)
    unsure = night(chatcore=0.4, chatcore_low=0.2, chatcore_high=0.6)
    verdict = assess(store, unsure, history(store), EvalRequest())
    assert not verdict.regressed
    assert verdict.is_inside
    assert verdict.text == (
        f"chatcore 0.4 (0.2 to 0.6), -0.1 (-0.3828 to +0.1828) against 0.5 of run "
        f"{verdict.baseline_run}; the interval of the difference includes 0"
    )
    sure = night(chatcore=0.01, chatcore_low=0.0, chatcore_high=0.02)
    verdict = assess(store, sure, history(store), EvalRequest())
    assert (verdict.regressed, verdict.is_inside) == (True, False)
    assert verdict.facts["delta"]["high"] < 0


@pytest.mark.parametrize(("lost", "gained", "regressed"), [(6, 0, True), (14, 8, False)])
def test_answers_to_the_same_questions_decide_together(store, lost, gained, regressed):
    """Both lose 6 of 100 questions; the intervals of the two scores overlap both times."""
    nights: list[Evaluation] = []
    for name, right in (("first", range(50)), ("second", range(lost, 50 + gained))):
        share = len(right) / 100
        manifest = put_measured(
            store,
            "chat_eval_sft",
            inputs={"sft": make_manifest("sft", files={"data": name})},
            metrics={"sums": share, "sums_low": share - 0.1, "sums_high": share + 0.1},
            examples=[
                {"task": "sums", "place": i, "answer": "", "correct": i in right}
                for i in range(100)
            ],
        )
        run = put_run(store, f"eval-main-{name}", manifest, name="eval-main")
        nights.append(Evaluation(run=run, manifest=manifest))
    old, new = nights
    verdict = assess(store, new, [old], EvalRequest(metric="sums", drop=0.02))
    assert verdict.delta.value == pytest.approx(-0.06)
    assert (verdict.regressed, verdict.is_inside) == (regressed, not regressed)


def test_a_metric_that_failed_says_why(store, night):
    newest = night(gsm8k=0.1, chatcore_failed="no sandbox here")
    with pytest.raises(
        ConfigError, match=r"has not measured chatcore or core.*no sandbox"
    ) as caught:
        assess(store, newest, history(store), EvalRequest())
    assert caught.value.hint == "it has measured: gsm8k"


def test_the_history_is_a_table_latest_first(store, night):
    night(chatcore=0.9, chatcore_low=0.8, chatcore_high=1.0, gsm8k=0.1)
    night(chatcore=0.5)
    rows = history_rows(history(store), "chatcore")
    assert [row["chatcore"] for row in rows] == ["0.5", "0.9 (0.8 to 1)"]
    assert rows[1]["gsm8k"] == "0.1"
    assert all(len(row["model"]) == 12 for row in rows)


def test_a_damaged_evaluation_is_left_out_of_the_history(store, night):
    damaged: Manifest = night(chatcore=0.9).manifest
    night(chatcore=0.5)
    store.put(f"{damaged.stage}/{damaged.fingerprint}/manifest.json", b"{}")
    assert len(history(store)) == 1
