"""What is said of one stage: how far it is, what it measured."""

from flows.orchestration.stage_page import metric_rows
from flows.render.events import Loop
from flows.render.table import Table, texts
from flows.render.text import fenced


def progress(values: dict[str, float], *, step: int, total: int) -> str:
    loop = Loop.of({"unit": "step", "step": step - 1, "total": total})
    loop.move({"step": step, "total": total, "values": values})
    return str(loop)


def test_progress_names_step_loss_and_speed():
    values = {"loss": 3.2101234, "tokens_per_second": 4887.33, "mfu": 0.412}
    expected = "step 1200/32000, loss 3.21, 4,887 tokens/s, 41.2 % MFU"
    assert progress(values, step=1200, total=32000) == expected


def test_progress_of_rl_says_how_long_a_step_takes():
    values = {"reward": 0.25, "answer_tokens": 17.4, "useful_share": 0.875, "seconds": 5.66}
    expected = "reward 0.25, answer_tokens 17.4, useful_share 0.875, 5.7 s a step"
    assert progress(values, step=30, total=30) == f"step 30/30, {expected}"


def test_metrics_have_their_interval_in_their_own_row():
    metrics = {"core": 0.76254321, "core_low": 0.71957, "core_high": 0.7992, "steps": 24}
    assert metric_rows(metrics) == [
        {"metric": "core", "value": 0.762543, "95 % interval": "0.7196 to 0.7992"},
        {"metric": "steps", "value": 24, "95 % interval": ""},
    ]


def test_metrics_without_intervals_have_no_column_of_them():
    metrics = {"length": 4, "device": "cpu", "compile": False}
    assert metric_rows(metrics) == [
        {"metric": "length", "value": 4},
        {"metric": "device", "value": "cpu"},
        {"metric": "compile", "value": False},
    ]
    assert metric_rows({}) == []


def test_a_block_is_longer_than_any_fence_inside():
    assert fenced("a ``` b").startswith("````text\n")


def test_cells_cannot_break_a_table():
    text = Table(columns=texts("a", "b"), rows=[["x|y", "one\ntwo"]]).markdown()
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | one two |"
