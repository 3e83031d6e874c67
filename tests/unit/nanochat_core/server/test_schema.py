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


def test_a_request_may_leave_the_settings_out():
    request = chat({"messages": [HELLO]})
    assert [message.model_dump() for message in request.messages] == [HELLO]
    assert request.temperature is request.top_k is request.max_tokens is request.seed is None
    nulls = {"temperature": None, "top_k": None, "max_tokens": None, "seed": None}
    assert chat({"messages": [HELLO], **nulls}) == request


def test_unknown_keys_are_ignored():
    plain = chat({"messages": [HELLO]})
    assert chat({"messages": [{**HELLO, "name": "x"}], "model": "y", "stream": True}) == plain


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 2}, {"top_k": 0}, {"top_k": 200}, {"seed": -1}]
)
def test_the_limits_themselves_are_allowed(settings):
    request = chat({"messages": [HELLO], **settings})
    assert all(getattr(request, name) == value for name, value in settings.items())


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b'{"messages": "\xff"}', b"null", b"[]", b"[" * 30_000, SURROGATE),
        *({}, {"messages": "hello"}, {"messages": ["hello"]}, {"messages": [{"role": "user"}]}),
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ["hello"]}]},
        {"messages": [HELLO], "temperature": "1"},
        {"messages": [HELLO], "temperature": True},
        {"messages": [HELLO], "top_k": 1.5},
        {"messages": [HELLO], "max_tokens": [1]},
    ],
)
def test_what_is_not_of_the_form_is_a_422(body):
    assert refused(body)[0] == 422


SAID = {"role": "assistant", "content": "x"}
OVER = [
    *({"messages": []}, {"messages": [HELLO] * 501}, {"messages": [HELLO, HELLO]}),
    *({"messages": [HELLO, SAID]}, {"messages": [SAID]}, {"messages": [SAID | {"role": "tool"}]}),
    *({"messages": [{"role": "system", "content": "x"}]}, {"messages": [HELLO | {"content": ""}]}),
    *({"messages": [HELLO | {"content": "x" * 8001}]}, {"temperature": 2.01}, {"temperature": -1}),
    *({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 201}, {"top_k": -1}),
    *({"top_k": 10**400}, {"max_tokens": 0}, {"max_tokens": 4097}, {"seed": 2**63}),
]
HUGE = b'{"messages": [{"role": "user", "content": "x"}],"temperature":1e999}'


def test_what_is_over_a_limit_is_a_400_that_names_it_and_by_how_much(transcript):
    for change in OVER:
        status, message = refused({"messages": [HELLO], **change})
        transcript.check(str(change)[:70], f"{status} {message}")
    transcript.check("1e999", f"{refused(HUGE)}")


def test_a_conversation_of_32000_characters_is_read_and_one_more_is_not():
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x" * 6400} for i in range(5)]
    assert len(chat({"messages": turns}).messages) == 5
    turns[0]["content"] += "x"
    status, message = refused({"messages": turns})
    assert (status, "32001" in message) == (400, True)


def test_a_body_of_very_many_parts_is_refused_before_it_is_parsed():
    for body in (b"[" + b"[]," * 300_000 + b"1]", b'{"x":[' + b"1," * 40_000 + b"1]}"):
        assert refused(body) == (400, "the body has more than 40000 commas and opening brackets")
    assert len(chat({"messages": [{"role": "user", "content": "[{," * 2000}]}).messages) == 1


def test_a_body_above_a_megabyte_is_a_413():
    assert refused(b" " * (2**20 + 1))[0] == 413


def test_a_system_message_may_come_first():
    system = {"role": "system", "content": "be brief"}
    assert len(chat({"messages": [system, HELLO]}).messages) == 2


def test_the_model_may_have_said_nothing():
    chat({"messages": [HELLO, {"role": "assistant", "content": ""}, HELLO]})


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
