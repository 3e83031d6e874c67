"""Texts of one stage on its page: how far it is, what it measured."""

import pytest

from flows.orchestration.stage_page import metric_rows
from flows.render.events import Loop
from flows.render.table import Table, texts
from flows.render.text import fenced


@pytest.mark.parametrize(
    ("step", "values", "text"),
    [
        (
            1200,
            {"loss": 3.2101234, "tokens_per_second": 4887.33, "mfu": 0.412},
            "step 1200/32000, loss 3.21, 4,887 tokens/s, 41.2 % MFU",
        ),
        (
            30,
            {"reward": 0.25, "answer_tokens": 17.4, "useful_share": 0.875, "seconds": 5.66},
            "step 30/32000, reward 0.25, answer_tokens 17.4, useful_share 0.875, 5.7 s a step",
        ),
    ],
)
def test_progress_names_the_step_and_what_was_measured(step, values, text):
    loop = Loop.of({"unit": "step", "step": step - 1, "total": 32000})
    loop.move({"step": step, "total": 32000, "values": values})
    assert str(loop) == text


def test_a_column_of_intervals_is_there_if_a_metric_has_one():
    metrics = {"core": 0.76254321, "core_low": 0.71957, "core_high": 0.7992, "steps": 24}
    assert metric_rows(metrics) == [
        {"metric": "core", "value": 0.762543, "95 % interval": "0.7196 to 0.7992"},
        {"metric": "steps", "value": 24, "95 % interval": ""},
    ]
    assert metric_rows({"device": "cpu"}) == [{"metric": "device", "value": "cpu"}]


def test_text_of_others_breaks_no_block_and_no_table():
    assert fenced("a ``` b").startswith("````text\n")
    text = Table(columns=texts("a", "b"), rows=[["x|y", "one\ntwo"]]).markdown()
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | one two |"
