import ast
import re

import httpx
import pytest

from nanochat_core.server.api.chat_api import sampling_params
from nanochat_core.server.service import ServerConfig
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.live import NAME, PATIENCE, body, raw, serving, wait_until


def chat(client, text, **settings):
    return client.chat.completions.create(model=NAME, **body(text), **settings)


TOKENS = [[TOKENIZER.bos, *TOKENIZER.encode(f"echo {letter}")] for letter in "ab"]
DEVELOPER = {"role": "developer", "content": "echo "}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
SILENT = {"role": "assistant", "content": None}
# Options that ask for nothing.
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "top_p": 0, "n": 1}
FOR_CHAT = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"]}
FOR_TEXT = {"echo": False, "suffix": "", "best_of": 1}
ANSWERS = [  # what is asked, the text of each choice, and why it ended
    (body("echo hello"), ["hello"], "stop"),
    (body("long", max_tokens=3), ["abc"], "length"),
    (body("long", max_completion_tokens=3), ["abc"], "length"),
    (body("hold", stop=["ef", "xy"]), ["abcd"], "stop"),
    (body("echo hi", n=3), ["hi"] * 3, "stop"),
    (body("call"), ["it is 36"], "stop"),
    (body("call", stop="is x"), ["it is 36"], "stop"),
    (body("echo So:\n#### 42"), ["So:\n42"], "stop"),
    ({"messages": [DEVELOPER, PARTS]}, ["\n\nhello"], "stop"),
    ({"messages": [PARTS, SILENT, *body("echo hi")["messages"]]}, ["hi"], "stop"),
    ({**body("echo hi"), **NEUTRAL, **FOR_CHAT}, ["hi"], "stop"),
    ({"prompt": "echo So:\n#### 42"}, ["So:\n#### 42"], "stop"),
    ({"prompt": ["echo a", "echo b"], "n": 2}, ["a", "a", "b", "b"], "stop"),
    ({"prompt": TOKENS}, ["a", "b"], "stop"),
    ({"prompt": "long"}, ["abcdefgh" * 2], "length"),  # sixteen tokens unless more are asked for
    ({"prompt": "echo hi", **NEUTRAL, **FOR_TEXT}, ["hi"], "stop"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "texts", "reason"), ANSWERS)
def test_an_answer_has_its_text_its_end_and_its_log_probabilities_whole_and_streamed(
    client, live, asked, texts, reason, stream
):
    is_chat = "messages" in asked
    create = (client.chat.completions if is_chat else client.completions).create
    answer = create(model=NAME, stream=stream, logprobs=True if is_chat else 0, **asked)
    found, logged, ends = ([""] * len(texts) for _ in range(3))
    for choice in (c for chunk in (answer if stream else [answer]) for c in chunk.choices):
        part = (choice.delta if stream else choice.message).content if is_chat else choice.text
        logs = choice.logprobs
        tokens = (
            [t.token for t in logs.content] if logs and is_chat else logs.tokens if logs else []
        )
        found[choice.index] += part or ""
        logged[choice.index] += "".join(tokens)
        ends[choice.index] = choice.finish_reason
    assert found == logged == texts
    assert set(ends) == {reason}
    wait_until(lambda: live.running == 0)


LETTERS = {"prompt": "echo h\u00e9 l\u20ac!", "logprobs": 2, "stop": " x"}
RESPONSES = {
    "chat": body("echo h\u00e9", logprobs=True, top_logprobs=2),
    "three choices": body("echo hi", n=3),
    "chat streamed": body("echo hi", stream=True),
    "chat streamed with its usage": body(
        "call", stream=True, stream_options={"include_usage": True}
    ),
    "text of tokens": {"prompt": TOKENS[0]},
    "letters of several tokens": LETTERS,
    "letters of several tokens streamed": LETTERS | {"stream": True},
}


def test_responses_have_openais_form(live, transcript):
    for name, ask in RESPONSES.items():
        path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
        text = re.sub(r'(?<="created":) ?[0-9]+', "TIME", live.post(path, ask).text)
        (own,) = set(re.findall(r"cmpl-([0-9a-f]{24})", text))  # the same in all chunks
        transcript.check(name, text.replace(own, "ID"))


def test_the_model_is_listed(client, openai):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "nanochat"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.body["message"] == f"the model here is {NAME}"


REFUSED = [  # settings, of which the last is the field that the refusal names
    *({"temperature": 3}, {"n": 9}, {"top_p": 1.5}, {"messages": []}, {"stop": 5}),
    *({"messages": [{"role": role, "content": None}]} for role in ("tool", "user")),
    *({"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"logit_bias": {"5": 100}}),
    *({"response_format": {"type": "json_object"}}, {"tools": [], "tool_choice": "required"}),
    *({"modalities": ["text", "audio"]}, {"max_tokens": 4000, "n": 8, "top_logprobs": 20}),
]
REFUSED_TEXT = [
    *({"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"prompt": "x" * 5000}, {"prompt": []}),
    {"prompt": ["a", "b", "c"], "n": 3},
    *({"prompt": ids} for ids in ([70, TOKENIZER.vocab_size], [-1], [[70], [1.5]])),
]


def test_a_refusal_is_an_error_of_openais_and_names_its_field(client, openai, transcript):
    for settings in (*REFUSED, *REFUSED_TEXT):
        is_chat, [*_, param] = settings in REFUSED, settings
        create = (client.chat.completions if is_chat else client.completions).create
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{"model": NAME, **(body("x") if is_chat else {"prompt": "x"}), **settings})
        assert caught.value.body["param"] == param
        assert caught.value.body["type"] == "invalid_request_error"
        transcript.check(str(settings)[:70], caught.value.body["message"])


def test_what_is_next_to_nothing_in_float32_is_the_likeliest_token():
    for given in ((1e-30, None), (9e-7, None), (1.0, None, 1e-30), (1.0, None, 0.0)):
        assert sampling_params(*given).temperature == 0.0
    least = sampling_params(1e-6, None, 1e-6)
    assert (least.temperature, least.top_p) == (1e-6, 1e-6)


def test_a_stop_string_of_a_later_prompt_ends_it_while_earlier_ones_go_on(client):
    chunks = client.completions.create(
        model=NAME, prompt=["long", "token " + "90 " * 1000], stop="Z", max_tokens=800, stream=True
    )
    ended = [c.choices[0] for c in chunks if c.choices[0].finish_reason]
    reasons = [(choice.index, choice.finish_reason) for choice in ended]
    assert reasons == [(1, "stop"), (0, "length")]


@pytest.mark.parametrize(
    ("text", "status", "kind", "says"),
    [
        ("fail", 500, "server_error", "the engine failed"),
        ("refuse", 400, "invalid_request_error", "this engine does not like it"),
        ("hold", 504, "server_error", "took longer than 0.3 seconds"),
    ],
)
def test_an_answer_that_fails_says_whose_fault_it_is_and_is_not_repeated(
    text, status, kind, says, openai
):
    seconds = 0.3 if text == "hold" else 600.0
    with (
        serving(ServerConfig(log="none", max_seconds=seconds)) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client,  # it would, by itself
    ):
        asked = {"model": NAME, **body(text), "max_tokens": 4000}
        with pytest.raises(openai.APIStatusError, match=says) as caught:
            client.chat.completions.create(**asked)
        assert caught.value.status_code == status
        assert caught.value.body["type"] == kind
        assert "retry-after" not in caught.value.response.headers
        with pytest.raises(openai.APIError, match=says) as caught:
            list(client.chat.completions.create(**asked, stream=True))
        assert caught.value.body["type"] == kind
        requests = httpx.get(f"{live.url}/metrics", timeout=PATIENCE).text
        assert f'requests_total{{route="/v1/chat/completions",status="{status}"}} 1.0' in requests


def test_a_client_that_leaves_before_a_whole_answer_frees_the_slot(live):
    with live.connect() as connection:
        connection.sendall(raw(body("hold"), b"/v1/chat/completions"))
        wait_until(lambda: live.running == 1)
    wait_until(lambda: live.running == 0)


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
def test_tokens_go_out_with_their_text_and_none_of_a_stop_string(
    client, live, caplog, monkeypatch, route, asked, stop, text
):
    monkeypatch.setattr(live.service, "rules", ServerConfig(log="contents"))
    is_chat = route == "chat"

    def bytes_of(logs):
        tokens = (logs and (logs.content if is_chat else logs.tokens)) or []
        return [bytes(t.bytes) if is_chat else _bytes_of(t) for t in tokens]

    form = {"model": NAME, "stop": stop, "max_tokens": 64}
    form |= {**body(asked), "logprobs": True} if is_chat else {"prompt": asked, "logprobs": 0}
    create = (client.chat.completions if is_chat else client.completions).create
    with caplog.at_level("INFO"):
        whole = create(**form, n=2).choices
        choices = [chunk.choices[0] for chunk in create(**form, stream=True)]
        wait_until(lambda: live.running == 0 and caplog.text.count("answered: ") == 3)
    for choice in whole:
        assert (choice.message.content if is_chat else choice.text) == text
        assert b"".join(bytes_of(choice.logprobs)).decode() == text
    for choice in choices:
        content = choice.delta.content if is_chat else choice.text
        assert b"".join(bytes_of(choice.logprobs)).decode() == (content or "")
    lines = [record.getMessage() for record in caplog.records]
    answers = [ast.literal_eval(line[10:]) for line in lines if line.startswith("answered: ")]
    # Each by itself, and whole. Text that is held back is written behind the call that follows it.
    calls = {"it is ": "it is 12*336", "it is 36": "it 12*336is 36"} if asked == "call" else {}
    assert answers == [calls.get(text, text)] * 3


def _bytes_of(token):
    """Return the bytes of a token of /v1/completions."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
