"""`python -m nanochat_core.engine` compares the engine with the reference, and times both."""

import pytest

from nanochat_core.engine.__main__ import main
from nanochat_core.engine.answer import Completion
from nanochat_core.engine.engine import Engine
from nanochat_core.model.checkpoint import save_model

pytestmark = pytest.mark.torch


@pytest.fixture
def directory(make_model, tokenizer, tmp_path):
    model = make_model()
    (tmp_path / "files").mkdir()
    tokenizer.save(tmp_path / "files")
    directory = tmp_path / "model"
    directory.mkdir()
    save_model(directory, model, tokenizer=tmp_path / "files", optimizer={}, made_by="sft")
    return str(directory)


@pytest.mark.parametrize(
    "options", [(), ("--temperature", "1", "--seed", "3", "--runner", "torch")]
)
def test_the_two_are_equal_and_timed(directory, capsys, options):
    assert main([directory, "--prompt", "ab", "--max-tokens", "9", *options]) == 0
    reference, engine, *answer, equal = capsys.readouterr().out.splitlines()
    assert reference.startswith("reference ")
    assert engine.startswith("engine ")
    assert "\n".join(answer).startswith("ab")
    assert equal in ("equal: 9 tokens", "equal: 4 tokens")  # the second ends itself


def test_the_first_token_that_differs_is_named(directory, capsys, monkeypatch):
    def answer(self, *prompts, **settings):
        [[found]] = real(self, *prompts, **settings)
        ids = [*found.ids[:2], 66, *found.ids[3:]]
        return [[Completion(ids=ids, mask=found.mask, finished=found.finished)]]

    real = Engine.complete
    monkeypatch.setattr(Engine, "complete", answer)
    assert main([directory, "--prompt", "ab", "--max-tokens", "4"]) == 1
    assert "different from token 2 on: B" in capsys.readouterr().out


def test_what_cannot_be_used_is_one_line(directory, tmp_path, capsys):
    assert main([directory, "--device", "foo"]) == main([str(tmp_path)]) == 1
    error, hint, *other = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --device foo cannot be used here: ")
    assert hint == "hint: cpu, cuda or cuda:1"
    assert other[0] == f"error: {tmp_path} is not a model: it has no config.json"
