import contextlib

import numpy as np
import pytest

from nanochat_core.data.conversations.disk_shuffle import Spool, common_prompts
from tasks.kinds.files import JsonLines


def ask(text, answer="yes"):
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    }


@pytest.fixture
def spool_of():
    with contextlib.ExitStack() as stack:

        def make(path, examples):
            spool = stack.enter_context(Spool(path))
            for example in examples:
                spool.add(example)
            return spool

        yield make


def test_lines_are_written_in_the_order_that_is_asked_for(spool_of, tmp_path):
    examples = [ask(f"{i} \u00e9\n\U0001f600") for i in range(500)]
    spool = spool_of(tmp_path / "lines", examples)
    order = np.random.default_rng(0).permutation(500)
    path = tmp_path / "t" / "train.jsonl"
    spool.split(order).write(path, scratch=tmp_path)
    assert list(JsonLines(path)) == [examples[i] for i in order]
    spool.split(order).first(3).write(path, scratch=tmp_path)
    assert list(JsonLines(path)) == [examples[i] for i in order[:3]]
    assert [spool.read(i) for i in (0, 499, 7)] == [examples[i] for i in (0, 499, 7)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lines", "t"]


def test_what_is_asked_in_both_is_found_whatever_the_answer(spool_of, tmp_path):
    train = spool_of(tmp_path / "a", [ask("1"), ask("2"), ask("3")])
    test = spool_of(tmp_path / "b", [ask("9"), ask("3", "no"), ask("1"), ask("\ud800")])
    assert common_prompts(train.everything(), test.everything()).tolist() == [1, 2]
    assert common_prompts(train.everything().first(2), test.everything()).tolist() == [2]
    assert common_prompts(train.everything().first(0), test.everything()).tolist() == []
