"""Text that waits for a stop string: its log-probabilities, and what the log has of it."""

import ast
import logging

import pytest

from nanochat_core.server.config import ServerConfig
from tests.support.nanochat_core.server.live import NAME, Live, serving


@pytest.fixture(scope="module")
def openai():
    """OpenAI's own client library; its import costs a second that no other file needs."""
    import openai

    return openai


@pytest.fixture
def client(live: Live, openai):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        yield client


def ask(text: str) -> list:
    return [{"role": "user", "content": text}]


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
    if route == "chat":
        form = {"model": NAME, "messages": ask(asked), "logprobs": True, "stop": stop}
        stream = client.chat.completions.create(**form, stream=True)
        whole = client.chat.completions.create(**form).choices[0]
        parts = [
            (c.choices[0].delta.content, [bytes(t.bytes) for t in (logs.content if logs else [])])
            for c in stream
            for logs in [c.choices[0].logprobs]
        ]
        sent = [bytes(t.bytes) for t in whole.logprobs.content] if whole.logprobs else []
        assert whole.message.content == text
    else:
        form = {"model": NAME, "prompt": asked, "logprobs": 0, "stop": stop, "max_tokens": 64}
        stream = client.completions.create(**form, stream=True)
        whole = client.completions.create(**form).choices[0]
        parts = [
            (c.choices[0].text, [_bytes_of(t) for t in (logs.tokens if logs else [])])
            for c in stream
            for logs in [c.choices[0].logprobs]
        ]
        sent = [_bytes_of(t) for t in whole.logprobs.tokens] if whole.logprobs else []
        assert whole.text == text
    for content, tokens in parts:
        assert b"".join(tokens).decode() == (content or "")
    assert b"".join(sent).decode() == text


def _bytes_of(token: str) -> bytes:
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
            client.chat.completions.create(model=NAME, messages=ask(asked), n=n, stop=stop)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("answered: ")]
    answers = [ast.literal_eval(line.removeprefix("answered: ")) for line in lines]
    # Text that is held back is written behind the call that follows it.
    calls = {"it is ": "it is 12*336", "it is 36": "it 12*336is 36"} if asked == "call" else {}
    assert answers == [calls.get(text, text)] * n
