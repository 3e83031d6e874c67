"""Text that waits for a stop string: its log-probabilities, and what the log has of it."""

import ast
import logging

import pytest

from nanochat_core.server.config import ServerConfig
from tests.support.nanochat_core.server.live import NAME, body, serving

# What is asked, the stop strings, and the text of the answer.
STOPPED = [
    ("echo abcdef", ["ef"], "abcd"),  # the stop string comes
    ("echo abcde", ["ef"], "abcde"),  # only its beginning comes
    ("echo abababac", ["abac"], "abab"),  # its beginning comes more than once
    ("echo ababab", ["abac", "bb"], "ababab"),
    ("echo xyz", ["x"], ""),  # nothing is left of the answer
    ("echo a\u20acb", ["\u20acb"], "a"),
    ("call", ["36"], "it is "),
    ("call", ["is 37"], "it is 36"),  # held back across a call
    ("echo a\nb #### 4", ["####"], "a\nb "),
]


@pytest.mark.parametrize("route", ["chat", "text"])
@pytest.mark.parametrize(("asked", "stop", "text"), STOPPED)
def test_tokens_go_out_with_their_text_and_none_of_a_stop_string(client, route, asked, stop, text):
    is_chat = route == "chat"

    def bytes_of(logs):
        tokens = (logs and (logs.content if is_chat else logs.tokens)) or []
        return [bytes(t.bytes) if is_chat else _bytes_of(t) for t in tokens]

    form = {"model": NAME, "stop": stop, "max_tokens": 64}
    form |= {**body(asked), "logprobs": True} if is_chat else {"prompt": asked, "logprobs": 0}
    create = (client.chat.completions if is_chat else client.completions).create
    whole = create(**form).choices[0]
    assert (whole.message.content if is_chat else whole.text) == text
    sent = bytes_of(whole.logprobs)
    choices = [chunk.choices[0] for chunk in create(**form, stream=True)]
    parts = [(c.delta.content if is_chat else c.text, bytes_of(c.logprobs)) for c in choices]
    for content, tokens in parts:
        assert b"".join(tokens).decode() == (content or "")
    assert b"".join(sent).decode() == text


def _bytes_of(token):
    """A token of /v1/completions."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


@pytest.mark.parametrize(("asked", "stop", "text"), STOPPED)
@pytest.mark.parametrize("n", [1, 3])
def test_the_log_of_contents_has_each_answer_by_itself_and_whole(
    openai, caplog, asked, stop, text, n
):
    caplog.set_level(logging.INFO)
    with serving(ServerConfig(log="contents")) as live:
        base = {"base_url": f"{live.url}/v1", "api_key": "none"}
        with openai.OpenAI(**base) as client:
            client.chat.completions.create(model=NAME, **body(asked), n=n, stop=stop)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("answered: ")]
    answers = [ast.literal_eval(line.removeprefix("answered: ")) for line in lines]
    # Text that is held back is written behind the call that follows it.
    calls = {"it is ": "it is 12*336", "it is 36": "it 12*336is 36"} if asked == "call" else {}
    assert answers == [calls.get(text, text)] * n
