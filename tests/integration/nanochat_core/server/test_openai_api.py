import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from nanochat_core.server.api.chat_api import sampling_params
from nanochat_core.server.service import ServerConfig
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.hostile_http import HEAD, connect
from tests.support.nanochat_core.server.live import NAME, PATIENCE, body, serving, wait_until


def chat(client, text, **settings):
    return client.chat.completions.create(model=NAME, **body(text), **settings)


def test_a_whole_answer(client):
    answer = chat(client, "echo hello", seed=1)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello"
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 5)
    assert answer.usage.total_tokens == 19
    assert answer.model == NAME
    assert chat(client, "echo hi", n=3).usage.completion_tokens == 6


def test_a_streamed_answer_with_its_usage(client):
    chunks = list(chat(client, "echo hello", stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_ends_with_done_and_has_no_usage_unasked(live):
    response = httpx.post(
        f"{live.url}/v1/chat/completions", json=body(stream=True), timeout=PATIENCE
    )
    assert response.text.endswith("data: [DONE]\n\n")
    assert "usage" not in response.text


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


def test_log_probabilities_of_tokens_and_alternatives(client):
    answer = chat(client, "echo h\u00e9", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0x68], [0xC3], [0xA9]]
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.5, -1.5]] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_letter_of_several_tokens_is_reported_by_its_bytes_and_moves_no_offset(client, stream):
    asked = {"model": NAME, "prompt": "echo h\u00e9 l\u20ac!", "logprobs": 2, "stop": " x"}
    if stream:
        chunks = client.completions.create(**asked, stream=True)
        logged = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    else:
        logged = [client.completions.create(**asked).choices[0].logprobs]
    assert [offset for logs in logged for offset in logs.text_offset] == [0, 1, 1, 2, 3, 4, 4, 4, 5]
    tokens = [token for logs in logged for token in logs.tokens]
    assert tokens[:4] == ["h", r"bytes:\xc3", r"bytes:\xa9", " "]
    tops = [top for logs in logged for top in logs.top_logprobs]
    assert tops[1] == {r"bytes:\xc3": -0.5, r"bytes:\xc4": -1.5}


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
    {"modalities": ["text", "audio"]},
]
REFUSED_TEXT = [
    *({"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"prompt": "x" * 5000}, {"prompt": []}),
    *({"prompt": ids} for ids in ([70, TOKENIZER.vocab_size], [-1], [[70], [1.5]])),
]


@pytest.mark.parametrize("settings", [*REFUSED, *REFUSED_TEXT])
def test_a_refusal_is_an_error_of_openais_and_names_its_field(client, settings, openai):
    is_chat, [*_, param] = settings in REFUSED, settings
    create = (client.chat.completions if is_chat else client.completions).create
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{"model": NAME, **(body("x") if is_chat else {"prompt": "x"}), **settings})
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"


def test_tokens_of_a_prompt_are_read_as_they_are(client):
    answer = client.completions.create(model=NAME, prompt=TOKENS[0])
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == ("a", 7)


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


def test_more_choices_than_may_be_are_refused(client, openai):
    with pytest.raises(openai.BadRequestError, match="3 prompts with n 3 are 9 choices"):
        client.completions.create(model=NAME, prompt=["a", "b", "c"], n=3)


def test_more_alternatives_than_may_be_held_for_a_slow_reader_are_refused(client, openai):
    with pytest.raises(openai.BadRequestError, match="choices are 640000, at most 50000"):
        chat(client, "x", n=8, max_tokens=4000, logprobs=True, top_logprobs=20)


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
    sent = json.dumps(body("hold")).encode()
    with connect(live.port) as connection:
        head = HEAD.replace(b"/chat", b"/v1/chat")
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        wait_until(lambda: live.running == 1)
    wait_until(lambda: live.running == 0)


def test_a_full_queue_is_one_that_the_client_retries(tmp_path, openai):
    rules = ServerConfig(log="none", max_waiting=0)
    route = {"route": "/v1/chat/completions", "status": "503"}
    with serving(rules, num_slots=1) as live, ThreadPoolExecutor(2) as threads:
        first = threads.submit(live.ask, f"hold {tmp_path / 'go'}")
        wait_until(lambda: live.running == 1)
        base = {"base_url": f"{live.url}/v1", "api_key": "none"}
        create = {"model": NAME, **body("echo x")}
        with openai.OpenAI(**base, max_retries=0) as impatient:
            with pytest.raises(openai.InternalServerError) as caught:
                impatient.chat.completions.create(**create)
            assert caught.value.status_code == 503
            assert json.loads(caught.value.response.text)["error"]["type"] == "overloaded_error"
        with openai.OpenAI(**base, max_retries=100) as client:
            answer = threads.submit(client.chat.completions.create, **create)
            wait_until(lambda: live.count("nanochat_requests_total", **route) == 2)
            (tmp_path / "go").touch()
            first.result()
            assert answer.result().choices[0].message.content == "x"
