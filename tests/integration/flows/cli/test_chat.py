"""Talking to a real, random model: answers stream, repeat by seed, and Ctrl-C stops only one."""

import io
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from flows.cli.app import main
from flows.cli.use.chat import say_answer
from flows.cli.use.chat_session import ChatSession, Sampling
from nanochat_core.engine.engine import Engine
from nanochat_core.errors import ConfigError
from nanochat_core.model.checkpoint import load_model
from nanochat_core.server.text import answer_pieces
from nanochat_core.tokenizer.bpe import Tokenizer

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0, top_k=0, max_tokens=8, seed=1)


def chat(model: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Chat with typed lines, without a terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", str(model), "--max-tokens", "8", *options])


def open_session(model: Path, sampling: Sampling = GREEDY) -> ChatSession:
    return ChatSession.open(model, sampling=sampling, device="cpu")


def test_a_prompt_is_answered_once(model, capsys):
    def answer(seed: str) -> str:
        words = ["chat", str(model), "-p", "hello", "--max-tokens", "20", "--seed", seed]
        assert main(words) == 0
        return capsys.readouterr().out

    assert answer("1") == answer("1")
    assert answer("1") != answer("2")
    assert answer("1").endswith("\n")


def test_the_same_answer_follows_when_the_conversation_is_forgotten(model, monkeypatch, capsys):
    lines = "/temperature 0\nhello\nhello\n/clear\nhello\n"
    assert chat(model, lines, monkeypatch) == 0
    said = capsys.readouterr()
    mode, first, second, forgotten, again = said.out.split("\n")[:5]
    assert (mode, forgotten) == ("temperature 0.0", "forgotten")
    assert first == again
    assert first != second
    assert said.err == ""


def test_a_seed_gives_the_answers_of_a_session_that_began_with_it(model, monkeypatch, capsys):
    assert chat(model, "one\n/clear\n/seed 7\none\ntwo\n", monkeypatch) == 0
    later = capsys.readouterr().out.split("seed 7\n")[1]
    assert chat(model, "one\ntwo\n", monkeypatch, "--seed", "7") == 0
    assert capsys.readouterr().out == later


def test_bytes_that_are_no_text_are_taken(model, monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["chat", str(model), "--max-tokens", "8"]) == 0
    assert main(["chat", str(model), "-p", "caf\udce9", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().err == ""


def test_settings_are_shown_changed_and_checked(model, monkeypatch, capsys):
    lines = "/topk 7\n/topk\n/topk many\n/temperature 3\n/temperature\n/frob\n/maxtokens 9\n"
    lines += "/maxtokens 0\n/seed 3\n/seed -1\n/help\n\n/quit\n/topk\n"
    assert chat(model, lines, monkeypatch) == 0
    said = capsys.readouterr()
    shown = "top_k 7\ntop_k 7\ntemperature 0.6\nmax_tokens 9\nseed 3\n/temperature N"
    assert said.out.startswith(shown)
    assert said.out.endswith("Ctrl-D leaves.\n")
    assert [line for line in said.err.splitlines() if line.startswith("error:")] == [
        "error: 'many' is not a number",
        "error: temperature is 3.0",
        "error: there is no command '/frob'",
        "error: max-tokens is 0",
        "error: seed is -1",
    ]


CALL = "<|python_start|>12+30<|python_end|><|output_start|>42<|output_end|>"
NO_RESULT = "<|python_start|>12+<|python_end|>"


@pytest.mark.parametrize(
    ("written", "shown", "text"),
    [
        (f"{CALL}#### 42", "[calculator: 12+30 = 42]\n42", "42"),
        (f"{CALL}\n#### 42", "[calculator: 12+30 = 42]\n42", "\n42"),
        (f"is {CALL}.", "is [calculator: 12+30 = 42].", "is ."),
        (f"is{CALL}42 now", "is [calculator: 12+30 = 42] 42 now", "is42 now"),
        (f"a: a\n{CALL}#### 1", "a: a\n[calculator: 12+30 = 42]\n1", "a: a\n1"),
        (f"{CALL}{CALL}", "[calculator: 12+30 = 42] [calculator: 12+30 = 42]", ""),
        (f"{NO_RESULT} or", "[calculator: 12+] or", " or"),
        (f"{NO_RESULT}#### 42", "[calculator: 12+]\n42", "42"),
        (NO_RESULT, "[calculator: 12+]", ""),
        ("<|output_start|>5<|output_end|>x", "x", "x"),  # no call, so no result
        ("#### Title\nx", "#### Title\nx", "#### Title\nx"),
    ],
)
def test_a_terminal_shows_calls_and_a_script_gets_the_text_alone(
    model, written, shown, text, monkeypatch, capsys
):
    tokenizer = Tokenizer.load(model / "tokenizer")
    parts = re.split(r"(<\|\w+\|>)", written)
    ids = [[tokenizer.special(p)] if p.startswith("<|") else tokenizer.encode(p) for p in parts]
    pieces = list(answer_pieces(tokenizer, [i for some in ids for i in some]))

    say_answer(pieces)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    say_answer(pieces)
    coloured = capsys.readouterr().out
    assert re.sub(r"\x1b\[\d*m", "", coloured) == shown
    assert coloured.count("\x1b[2m") == coloured.count("\x1b[0m")
    assert ("\x1b[2m" in coloured) == ("calculator" in shown)


def test_a_message_longer_than_the_context_is_refused_and_nothing_is_forgotten(model):
    session, other = open_session(model), open_session(model)
    assert list(session.answer("hello")) == list(other.answer("hello"))
    with pytest.raises(ConfigError, match=r"tokens long, this model reads 767"):
        list(session.answer("\u00e9\u00e8" * 1000))
    assert list(session.answer("and?")) == list(other.answer("and?"))


@pytest.mark.parametrize(
    ("lengths", "dropped"), [((250, 250), "1 earlier turn"), ((100, 100, 350), "2 earlier turns")]
)
def test_a_warning_has_the_number_of_turns_that_were_dropped(
    model, lengths, dropped, monkeypatch, capsys
):
    assert chat(model, "".join("1 " * length + "\n" for length in lengths), monkeypatch) == 0
    assert capsys.readouterr().err == f"warning: context full: dropped {dropped}\n"


def test_an_answer_that_was_stopped_stays_in_the_conversation(model):
    loaded, tokenizer = load_model(model, torch.device("cpu")), Tokenizer.load(model / "tokenizer")
    # In fp32: logits of a random model differ little, and in bf16 by nothing.
    session, other = (
        ChatSession(Engine(loaded, tokenizer), tokenizer, context=768, sampling=GREEDY)
        for _ in range(2)
    )
    stopped = session.answer("hello")
    first = next(stopped)
    stopped.close()
    list(other.answer("hello"))
    assert first
    assert list(session.answer("and then?")) != list(other.answer("and then?"))


def test_what_a_model_writes_cannot_drive_the_terminal(model, capsys):
    words = ["chat", str(model), "-p", "x", "--temperature", "2", "--top-k", "0"]
    assert main([*words, "--max-tokens", "900"]) == 0
    said = capsys.readouterr().out
    assert len(said) > 200
    assert not [c for c in said if ord(c) < 32 and c not in "\n\t"]
    assert "\x1b" not in said


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_folder_that_is_no_model(command, tmp_path, capsys):
    words = [command, str(tmp_path), *(["--port", "0"] if command == "serve" else [])]
    assert main(words) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {tmp_path} is not a model: it has no config.json"
    assert hint.startswith("hint: ")


def test_a_port_in_use_is_one_line(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port)]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: cannot listen on 127.0.0.1 port {port}: address already in use"
    assert "--port" in hint
