"""`nanochat identity` writes two files and shows the plan; it asks on a terminal only."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from tasks.base import text_of
from tests.support.flows.terminal import Terminal

PROFILE = """
profile = "tiny"
[task_data]
datasets = [
    { name = "conversation", grade = 1, num_train = 300, num_test = 100 },
    { name = "arithmetic", grade = 1, num_train = 100, num_test = 20 },
]
[midtrain]
mixture = [{ task = "conversation", num_examples = 200, epochs = 1 }]
[sft]
mixture = [{ task = "conversation", skip = 200, num_examples = 100, epochs = 1 }]
[chat_eval]
tasks = [{ name = "conversation", max_examples = 20, max_new_tokens = 64 }]
"""


class Answers:
    """The answers that a person types, in order; then the end of the input."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)
        self.asked: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.asked.append(prompt)
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """No terminal, and no answer."""
    found = Answers()
    monkeypatch.setattr("builtins.input", found)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    return found


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The file of a profile with few conversations."""
    path = tmp_path / "small.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return str(path)


def answers_in(path: Path) -> set[str]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    messages = (message for line in lines for message in line["messages"])
    return {text_of(m["content"]) for m in messages if m["role"] == "assistant"}


def test_it_writes_conversations_and_a_run_and_shows_its_plan(
    terminal: Terminal, tmp_path: Path, small: str, answers: Answers
) -> None:
    words = ("identity", "Juniper", "--profile", small, "--to", str(tmp_path))
    facts = ("--maker", "Ada", "--fact", "best friend=Otto", "--fact", "color=green")
    lines = terminal.said(*words, *facts)
    settings = tmp_path / "juniper.toml"
    assert lines[:2] == [f"{tmp_path / 'juniper.jsonl'}: written", f"{settings}: written"]
    plan = terminal.said("plan", str(settings))
    assert lines[3 : 3 + len(plan)] == plan
    assert "run juniper" in plan
    assert lines[-2].endswith(f"nanochat run {settings}")
    assert lines[-1].endswith("nanochat chat juniper")
    assert {"Ada made me.", "My best friend is Otto."} <= answers_in(tmp_path / "juniper.jsonl")
    assert answers.asked == []
    # The command that the file names writes it again.
    text = settings.read_text(encoding="utf-8")
    assert "nanochat identity Juniper --maker Ada" in text
    assert f"--fact 'best friend=Otto' --fact color=green --profile {small}" in text
    assert tomllib.loads(text)["name"] == "juniper"


def test_it_replaces_no_file_unless_asked_to(
    terminal: Terminal, tmp_path: Path, small: str
) -> None:
    words = ("identity", "Juniper", "--profile", small, "--to", str(tmp_path / "new"))
    terminal.said(*words)
    path = tmp_path / "new" / "juniper.jsonl"
    before = path.read_bytes()
    path.write_text("mine", encoding="utf-8")
    error, hint = terminal.fails(*words)
    assert error == f"{path} exists"
    assert "--force" in hint
    assert path.read_text(encoding="utf-8") == "mine"
    terminal.said(*words, "--force")
    assert path.read_bytes() == before


def test_what_cannot_be_written_is_refused_before_anything_is(
    terminal: Terminal, tmp_path: Path, small: str
) -> None:
    words = ("--profile", small, "--to", str(tmp_path / "new"))
    error, hint = terminal.fails("identity", "x" * 300, *words)
    assert "cannot be the name of a run" in error
    assert len(error) < 150
    assert terminal.fails("identity", "Ada", "--maker", "", *words)[0].startswith("'' cannot be")
    assert not (tmp_path / "new").exists()
    terminal.said("identity", "Ada", *words)
    again = ("--profile", str(tmp_path / "new" / "ada.toml"), "--to", str(tmp_path))
    error, hint = terminal.fails("identity", "Bob", *again)
    assert error.endswith("ada.toml gives the model another name already")
    assert "the profile that it was made from" in hint


def test_without_a_terminal_it_asks_nothing_and_takes_the_defaults(
    terminal: Terminal, tmp_path: Path, small: str, answers: Answers
) -> None:
    terminal.said("identity", "Juniper", "--profile", small, "--to", str(tmp_path))
    assert answers.asked == []
    found = answers_in(tmp_path / "juniper.jsonl")
    assert {"I am Juniper, a tiny language model.", "nanochat-flows made me."} & found
    assert "I am Juniper, a tiny language model." in found


def test_on_a_terminal_it_asks_and_the_end_of_the_input_ends_the_questions(
    terminal: Terminal, tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    typed = Answers("Ada", "", "likes chess", "pet=a snail called Ben")
    monkeypatch.setattr("builtins.input", typed)
    words = ("identity", "Juniper", "--profile", small, "--to", str(tmp_path))
    terminal.said(*words, warns="'likes chess' is not of the form ABOUT=VALUE")
    assert len(typed.asked) == 5
    assert "Juniper" in typed.asked[1]
    expected = {"Ada made me.", "I am Juniper, a tiny language model."}
    assert expected | {"My pet is a snail called Ben."} <= answers_in(tmp_path / "juniper.jsonl")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("Juniper", "--fact", "green"), "'green' is not of the form ABOUT=VALUE"),
        (("",), "'' is not a name: it has no letter and no digit"),
        (("Juniper", "--profile", "tyni"), "there is no profile 'tyni'"),
    ],
)
def test_a_mistake_ends_with_one_line_and_writes_nothing(
    terminal: Terminal, tmp_path: Path, words: tuple[str, ...], error: str
) -> None:
    assert terminal.fails("identity", *words, "--to", str(tmp_path))[0] == error
    assert list(tmp_path.glob("juniper*")) == []
