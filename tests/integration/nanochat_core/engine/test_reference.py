"""`python -m nanochat_core.engine` compares the engine with the reference, and times both."""

import re

import pytest

from nanochat_core.engine.__main__ import main
from nanochat_core.engine.answer import Completion
from nanochat_core.engine.engine import Engine

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "options", [(), ("--temperature", "1", "--seed", "3", "--runner", "torch")]
)
def test_the_two_are_equal_and_timed(model_dir, capsys, options):
    assert main([str(model_dir), "--prompt", "ab", "--max-tokens", "9", *options]) == 0
    reference, engine, *answer, equal = capsys.readouterr().out.splitlines()
    assert reference.startswith("reference ")
    assert engine.startswith("engine ")
    assert "\n".join(answer).startswith("ab")
    assert re.fullmatch("equal: [1-9] tokens", equal)


def test_the_first_token_that_differs_is_named(model_dir, capsys, monkeypatch):
    def answer(self, *prompts, **settings):
        [[found]] = real(self, *prompts, **settings)
        ids = [*found.ids[:2], 66, *found.ids[3:]]
        return [[Completion(ids=ids, mask=found.mask, finished=found.finished)]]

    real = Engine.complete
    monkeypatch.setattr(Engine, "complete", answer)
    assert main([str(model_dir), "--prompt", "ab", "--max-tokens", "4"]) == 1
    assert "different from token 2 on: B" in capsys.readouterr().out


def test_what_cannot_be_used_is_one_line(model_dir, tmp_path, capsys):
    assert main([str(model_dir), "--device", "foo"]) == main([str(tmp_path)]) == 1
    error, hint, *other = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --device foo cannot be used here: ")
    assert hint == "hint: cpu, cuda or cuda:1"
    assert other[0] == f"error: {tmp_path} is not a model: it has no config.json"
