"""`nanochat evals history`: a score over the runs that a name stood for, latest first."""

from typing import Any

import pytest

from flows.artifacts.runs import point
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal

STRIP = ["(0.3", "to", "0.5)", "------o------" + "\u00b7" * 19]


def judged(
    store: Store, stage: str, model: Manifest, right: int, *, suite: int = 0, **more: float
) -> Manifest:
    """An evaluation in which the first `right` of 100 questions were answered rightly."""
    share = right / 100
    ends = {"sums_low": share - 0.1, "sums_high": round(share + 0.1, 6)}
    return put_measured(
        store,
        stage,
        config={"chat_eval": {"suite": suite}},
        inputs={model.stage: model},
        metrics={"sums": share, **ends, "chatcore": share, **more},
        examples=[
            {"task": "sums", "place": i, "answer": str(i), "correct": i < right} for i in range(100)
        ],
    )


def model_of(store: Store, stage: str, seed: int) -> Manifest:
    return put_measured(store, stage, config={"seed": seed}, files={"model": f"{stage} {seed}"})


def day(number: int) -> dict[str, Any]:
    return {"started": f"2026-11-{number:02d}T03:00:00Z"}


@pytest.fixture
def nights(store: Store) -> list[Manifest]:
    """Model one was judged three nights, then came a better one; the tag points at the second."""
    one, two = model_of(store, "sft", 1), model_of(store, "sft", 2)
    first, second = (judged(store, "chat_eval_sft", m, r) for m, r in ((one, 40), (two, 70)))
    put_run(store, "mine-1", one, first, name="mine", **day(1))
    for number in (2, 3):
        put_run(store, f"eval-main-{number}", one, first, name="eval-main", **day(number))
    put_run(store, "mine-4", two, second, name="mine", **day(4))
    put_run(store, "eval-main-5", two, second, name="eval-main", **day(5))
    point(store, "main", "mine-4")
    return [first, second]


def test_a_tag_has_the_nights_on_which_it_was_evaluated(nights: list[Manifest], terminal: Terminal):
    lines = terminal.said("evals", "history", "main", "--metric", "sums")
    assert lines[0] == "sums of main, evaluated by chat_eval_sft"
    head, *rows = lines[2:]
    assert head.split()[:5] == ["started", "run", "model", "sums", "change"]
    assert [row.split()[1] for row in rows] == [
        *("eval-main-5", "mine-4", "eval-main-3", "eval-main-2")
    ]
    assert "0.7 (0.6 to 0.8)" in rows[0]
    assert "the same evaluation" in rows[0]
    # 30 of the same 100 questions: the pairs, not two samples.
    assert "+0.3 (+0.2043 to +0.3852) *" in rows[1]
    assert "the same evaluation" in rows[2]
    assert rows[3].split()[2:] == [*(nights[0].inputs["sft"].fingerprint[:12], "0.4"), *STRIP]


def test_a_runs_name_has_its_runs(nights: list[Manifest], terminal: Terminal):
    tree = terminal.read("evals", "history", "mine", "--metric", "sums")
    assert (tree["stage"], tree["metric"], tree["more"]) == ("chat_eval_sft", "sums", 0)
    newest, oldest = tree["evaluations"]
    assert newest["run"] == "mine-4"
    assert newest["evaluation"] == nights[1].fingerprint
    assert newest["model"] == nights[1].inputs["sft"].fingerprint
    assert (newest["value"], newest["low"], newest["high"]) == (0.7, 0.6, 0.8)
    assert newest["delta"]["clear"]
    assert oldest["delta"] is None
    assert not oldest["same"]


def test_without_a_metric_the_usual_one_is_shown(nights: list[Manifest], terminal: Terminal):
    tree = terminal.read("evals", "history", "mine")
    assert tree["metric"] == "chatcore"
    assert tree["evaluations"][0]["low"] is None
    assert tree["evaluations"][0]["delta"]["value"] == pytest.approx(0.3)


def test_the_best_chat_model_is_looked_at_unless_a_stage_is_named(
    nights: list[Manifest], store: Store, terminal: Terminal
):
    base = model_of(store, "pretrain", 1)
    of_base = judged(store, "base_eval", base, 10, val_bpb=1.5)
    rl = judged(store, "chat_eval_rl", model_of(store, "rl", 1), 90)
    put_run(store, "mine-6", nights[1], rl, of_base, name="mine", **day(6))
    tree = terminal.read("evals", "history", "mine")
    assert tree["stage"] == "chat_eval_rl"
    assert [e["value"] for e in tree["evaluations"]] == [0.9]
    tree = terminal.read("evals", "history", "sft@mine")
    assert [e["value"] for e in tree["evaluations"]] == [0.7, 0.7, 0.4]
    for words in (("mine", "--metric", "val_bpb"), ("pretrain@mine", "--metric", "val_bpb")):
        tree = terminal.read("evals", "history", *words)
        assert tree["stage"] == "base_eval"
        assert [e["value"] for e in tree["evaluations"]] == [1.5]


def test_scores_of_other_questions_have_no_difference(
    nights: list[Manifest], store: Store, terminal: Terminal
):
    other = judged(store, "chat_eval_sft", model_of(store, "sft", 3), 80, suite=1)
    put_run(store, "mine-7", other, name="mine", **day(7))
    rows = terminal.said("evals", "history", "mine", "--metric", "sums")[3:]
    assert "asked otherwise before" in rows[0]
    assert "+0.3" in rows[1]
    assert terminal.read("evals", "history", "mine")["evaluations"][0]["delta"] is None


def test_a_limit_keeps_the_difference_of_the_last_one_shown(
    nights: list[Manifest], terminal: Terminal
):
    lines = terminal.said("evals", "history", "mine", "--metric", "sums", "--limit", "1")
    assert "+0.3 (" in lines[3]
    assert lines[4:] == ["", "1 more before; --limit shows them"]


def test_a_tag_that_is_gone_still_has_its_nights(
    nights: list[Manifest], store: Store, terminal: Terminal
):
    store.delete("refs/main.json")
    tree = terminal.read("evals", "history", "main")
    assert [e["run"] for e in tree["evaluations"]] == ["eval-main-5", "eval-main-3", "eval-main-2"]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["tnyi"], "there is no run 'tnyi' in", "did you mean"),
        (["tiny"], "tiny was never run in", "nanochat run tiny"),
        (["../x"], "there is no stage '..'", "one of"),
        (["shards@mine"], "shards makes no model", "pretrain, midtrain, sft, rl"),
        (["mine", "--metric", "sum"], "no evaluation of mine measured sum", "did you mean 'sums'?"),
        (["mine", "--metric", "core"], "no evaluation of mine measured core", "one of: sums, chat"),
        (["bare"], "no model of bare was evaluated", "nanochat evals run bare"),
        (["mine", "--limit", "0"], "--limit is 0", "at least 1"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    nights: list[Manifest],
    store: Store,
    terminal: Terminal,
    words: list[str],
    error: str,
    hint: str,
):
    put_run(store, "bare", model_of(store, "shards", 0), name="bare")
    found = terminal.fails("evals", "history", *words)
    assert found[0].startswith(error)
    assert hint in found[1]
