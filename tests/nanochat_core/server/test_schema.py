import json

import pytest

from nanochat_core.server.schema import RequestError, parse_chat_request

HELLO = {"role": "user", "content": "hello"}


def parse(**tree):
    return parse_chat_request(json.dumps(tree).encode())


def refused(body: bytes | dict) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        parse_chat_request(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value.status, str(caught.value)


def test_a_request_may_leave_the_settings_out():
    request = parse(messages=[HELLO])
    assert request.messages == (HELLO,)
    assert (request.temperature, request.top_k, request.max_tokens) == (0.8, 50, 512)
    assert parse(messages=[HELLO], temperature=None, top_k=None, max_tokens=None) == request


def test_unknown_keys_are_ignored():
    assert parse(messages=[{**HELLO, "name": "x"}], model="y", stream=True).messages == (HELLO,)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 2}, {"top_k": 0}, {"top_k": 200}]
)
def test_the_limits_themselves_are_allowed(settings):
    request = parse(messages=[HELLO], **settings)
    assert all(getattr(request, name) == value for name, value in settings.items())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b"[" * 100_000,
        {},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ["hello"]}]},
        {"messages": [{"role": 1, "content": "hello"}]},
        {"messages": [HELLO], "temperature": "1"},
        {"messages": [HELLO], "temperature": True},
        {"messages": [HELLO], "top_k": 1.5},
        {"messages": [HELLO], "max_tokens": [1]},
    ],
)
def test_what_is_not_of_the_form_is_a_422(body):
    assert refused(body)[0] == 422


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "1 to 500 messages"),
        ({"messages": [HELLO] * 501}, "1 to 500 messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "1 to 8000"),
        ({"messages": [{"role": "user", "content": "x" * 8001}]}, "message 0 is 8001 characters"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [HELLO, HELLO]}, "take turns"),
        ({"messages": [HELLO, {"role": "assistant", "content": "x"}]}, "the last is the user's"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "take turns"),
        ({"messages": [{"role": "system", "content": "x"}]}, "take turns"),
        ({"temperature": 2.01}, "temperature must be from 0.0 to 2.0"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": 201}, "top_k must be from 0 to 200"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to 4096"),
        ({"max_tokens": 4097}, "max_tokens"),
    ],
)
def test_what_is_over_a_limit_is_a_400_that_names_it(change, says):
    status, message = refused({"messages": [HELLO], **change})
    assert status == 400
    assert says in message


def test_a_conversation_of_32000_characters_is_read_and_one_more_is_not():
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x" * 6400} for i in range(5)]
    assert len(parse(messages=turns).messages) == 5
    turns[0]["content"] += "x"
    status, message = refused({"messages": turns})
    assert (status, "32001" in message) == (400, True)


def test_a_body_above_a_megabyte_is_a_413():
    assert refused(b" " * (2**20 + 1))[0] == 413


def test_a_system_message_may_come_first():
    system = {"role": "system", "content": "be brief"}
    assert parse(messages=[system, HELLO]).messages == (system, HELLO)


def test_no_refusal_repeats_what_was_sent():
    secret = "correct horse"
    bodies = [
        {"messages": secret},
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [{"role": "user", "content": secret * 1000}]},
        {"messages": [HELLO], "temperature": secret},
        secret.encode(),
    ]
    assert all(secret not in refused(body)[1] for body in bodies)
