"""Questions of a user's own file in the chat evaluation."""

import pytest

from nanochat_core.config import EvalTaskConfig
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate import chat
from nanochat_core.evaluate.generate import greedy_answers
from tasks.base import Task, one_turn

pytestmark = pytest.mark.torch


def test_an_answer_to_an_own_question_is_compared_with_the_expected_one(model, tokenizer):
    engine = Engine(model, tokenizer)
    [answer] = greedy_answers(engine, [one_turn("Who?", "")], max_new_tokens=9)
    assert answer
    expected = [answer, f" {answer.swapcase()} ", f"{answer}x"]
    task = Task(name="own", split="test", examples=[one_turn("Who?", each) for each in expected])
    entry = EvalTaskConfig(name="own", max_examples=3, max_new_tokens=9)
    found = chat.evaluate_block(lambda *of: chat.answer_turns(engine, *of), task, range(3), entry)
    assert [record["correct"] for record in found] == [True, True, False]
    assert [record["prompt"] for record in found] == ["Who?"] * 3
    assert [record["expected"] for record in found] == expected
