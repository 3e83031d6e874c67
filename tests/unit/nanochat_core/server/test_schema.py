import json

import pytest

from nanochat_core.server.api.openai_schema import ChatCompletionRequest, CompletionRequest
from nanochat_core.server.api.schema import ChatRequest, RequestError, check_turns, parse

HELLO = {"role": "user", "content": "hello"}
SURROGATE = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'


def chat(body):
    request = parse(ChatRequest, body if isinstance(body, bytes) else json.dumps(body).encode())
    check_turns([(message.role, message.content) for message in request.messages])
    return request


def refused(body):
    with pytest.raises(RequestError) as caught:
        chat(body)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return caught.value.status, str(caught.value)


SAID = {"role": "assistant", "content": "x"}
SYSTEM = {"role": "system", "content": "be brief"}
LONG = [{"role": ("user", "assistant")[i % 2], "content": "x" * 6400} for i in range(5)]  # 32,000
ONE_MORE = [LONG[0] | {"content": "x" * 6401}, *LONG[1:]]
SETTINGS = dict.fromkeys(("temperature", "top_k", "max_tokens", "seed"))
READ = [  # in addition to one message, or in place of it
    *({}, SETTINGS, {"temperature": 0}, {"temperature": 2}, {"top_k": 0}, {"top_k": 200}),
    *({"seed": -1}, {"messages": [SYSTEM, HELLO]}, {"messages": LONG}),
    {"messages": [HELLO, SAID | {"content": ""}, HELLO]},  # a model may have said nothing
    {"messages": [HELLO | {"content": "[{," * 2000}]},
]
REFUSED = [
    *(b"", b"{}", b"{", b"\xff", b'{"messages": "\xff"}', b"null", b"[]", b"[" * 30_000, SURROGATE),
    *({"messages": None}, {"messages": "hello"}, {"messages": ["hello"]}),
    *({"messages": [{"role": "user"}]}, {"messages": [HELLO | {"content": None}]}),
    *({"messages": [HELLO | {"content": ["hello"]}]}, {"temperature": "1"}, {"temperature": True}),
    *({"top_k": 1.5}, {"max_tokens": [1]}),
    *({"messages": []}, {"messages": [HELLO] * 501}, {"messages": [HELLO, HELLO]}),
    *({"messages": [HELLO, SAID]}, {"messages": [SAID]}, {"messages": [SAID | {"role": "tool"}]}),
    *({"messages": [SYSTEM]}, {"messages": [HELLO | {"content": ""}]}, {"messages": ONE_MORE}),
    *({"messages": [HELLO | {"content": "x" * 8001}]}, {"temperature": 2.01}, {"temperature": -1}),
    *({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 201}, {"top_k": -1}),
    *({"top_k": 10**400}, {"max_tokens": 0}, {"max_tokens": 4097}, {"seed": 2**63}),
    b'{"messages": [{"role": "user", "content": "x"}],"temperature":1e999}',
    *(b"[" + b"[]," * 300_000 + b"1]", b'{"x":[' + b"1," * 40_000 + b"1]}"),  # before it is parsed
    b" " * (2**20 + 1),
]


@pytest.mark.parametrize("change", READ, ids=lambda change: str(change)[:40])
def test_a_request_within_the_limits_is_read_and_unknown_keys_are_ignored(change):
    body = {"messages": [HELLO], **change}
    assert chat(body).model_dump() == {**SETTINGS, **body}
    unknown = [message | {"name": "x"} for message in body["messages"]]
    assert chat(body | {"messages": unknown, "model": "y", "stream": True}) == chat(body)


def test_a_refusal_names_the_limit_and_by_how_much_it_is_exceeded(transcript):
    for one in REFUSED:
        status, message = refused(one if isinstance(one, bytes) else {"messages": [HELLO], **one})
        transcript.check(str(one)[:70], f"{status} {message}")


def test_no_refusal_repeats_what_was_sent():
    secret = "correct horse"
    bodies = [
        {"messages": secret},
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": secret * 1000}]},
        {"messages": [HELLO], "temperature": secret},
        secret.encode(),
        json.dumps({"messages": secret, "x": [1, {secret: 2}]}).encode(),
    ]
    assert all(secret not in refused(body)[1] for body in bodies)


def test_parts_of_text_are_joined_and_other_parts_refused(transcript):
    text = {"type": "text", "text": "a"}
    body = {"messages": [{"role": "user", "content": [text, {"type": "text", "text": "b"}]}]}
    assert parse(ChatCompletionRequest, json.dumps(body).encode()).messages[0].content == "ab"
    request = parse(CompletionRequest, b'{"prompt": "once", "stop": "end"}')  # either alone
    assert (request.prompt, request.stop) == (["once"], ["end"])
    body["messages"][0]["content"][1] = {"type": "image_url"}
    stops = b'{"prompt": "once", "stop": ["1", "2", "3", "4", "5"]}'
    sent = json.dumps(body).encode()
    for kind, form in ((ChatCompletionRequest, sent), (CompletionRequest, stops)):
        transcript.refused(kind.__name__, RequestError, parse, kind, form)
