import pytest

from nanochat_core.engine.tools.calls import ToolCalls, ToolTokens


@pytest.fixture
def tools(tokenizer):
    return ToolTokens.of(tokenizer)


def _ids(tokenizer, *pieces):
    """Ids of text and of special tokens, which are given by name."""
    ids = []
    for piece in pieces:
        is_special = piece.startswith("<|")
        ids += [tokenizer.special(piece)] if is_special else tokenizer.encode(piece)
    return ids


def _forced(tools, ids, *, room=1000):
    """What a stream of tokens makes the tool insert."""
    calls = ToolCalls(tools)
    for token in ids:
        assert not calls.forced
        calls.see(token, room=room)
    return tools.tokenizer.decode(list(calls.forced))


def test_a_call_is_answered(tokenizer, tools):
    ids = _ids(tokenizer, "so ", "<|python_start|>", "6 * 7", "<|python_end|>")
    assert _forced(tools, ids) == "<|output_start|>42<|output_end|>"


@pytest.mark.parametrize(
    "pieces",
    [
        ("6 * 7", "<|python_end|>"),
        ("<|python_start|>", "6 * 7"),
        ("<|python_start|>", "<|python_end|>"),
        ("<|python_start|>", "import os", "<|python_end|>"),
        ("<|python_start|>", "6", "<|output_end|>", "* 7", "<|python_end|>"),
        ("<|output_start|>", "6 * 7", "<|output_end|>"),
    ],
)
def test_what_is_no_call_is_not_answered(tokenizer, tools, pieces):
    assert _forced(tools, _ids(tokenizer, *pieces)) == ""


def test_a_call_begun_twice_counts_from_the_second_beginning(tokenizer, tools):
    ids = _ids(tokenizer, "<|python_start|>", "1 + ", "<|python_start|>", "2", "<|python_end|>")
    assert _forced(tools, ids) == "<|output_start|>2<|output_end|>"


def test_an_end_counts_once(tokenizer, tools):
    calls = ToolCalls(tools)
    for token in _ids(tokenizer, "<|python_start|>", "1", "<|python_end|>"):
        calls.see(token, room=100)
    calls.forced.clear()
    calls.see(tokenizer.special("<|python_end|>"), room=100)
    assert not calls.forced


def test_a_result_that_does_not_fit_is_left_out_whole(tokenizer, tools):
    ids = _ids(tokenizer, "<|python_start|>", "6 * 7", "<|python_end|>")
    assert _forced(tools, ids, room=4) == "<|output_start|>42<|output_end|>"
    assert _forced(tools, ids, room=3) == ""


def test_rows_do_not_share_state(tokenizer, tools):
    one, other = ToolCalls(tools), ToolCalls(tools)
    for token in _ids(tokenizer, "<|python_start|>", "1"):
        one.see(token, room=100)
    other.see(tokenizer.special("<|python_end|>"), room=100)
    assert not other.forced
