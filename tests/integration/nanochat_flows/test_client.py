"""A model of the store is chatted with from Python."""

from pathlib import Path

import pytest

from nanochat_flows.client import open_client
from tests.support.flows.chat_model import write_chat_model

pytestmark = pytest.mark.torch


def test_a_conversation_has_answers_that_repeat_by_their_seed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_chat_model(model)
    client = open_client(store=(tmp_path / "store").as_uri(), home=tmp_path / "home")
    first, second = (client.chat(str(model), max_tokens=8, seed=7) for _ in range(2))
    answers = [first.ask("hello"), first.ask("and again")]
    assert all(answers)
    pieces = list(second.answer("hello"))
    assert {piece.kind for piece in pieces} == {"text"}
    assert answers == ["".join(piece.text for piece in pieces), second.ask("and again")]
