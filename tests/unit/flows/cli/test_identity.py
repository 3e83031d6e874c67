"""`nanochat identity` writes two files and shows the plan; it asks on a terminal only."""

import json
import sys
import tomllib

import pytest

from tasks.base import text_of

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


@pytest.fixture
def small(tmp_path):
    """The file of a profile with few conversations."""
    path = tmp_path / "small.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return str(path)


def answers_in(path):
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    messages = (message for line in lines for message in line["messages"])
    return {text_of(m["content"]) for m in messages if m["role"] == "assistant"}


@pytest.fixture
def words(tmp_path, small):
    """The command, which writes to a folder."""
    return ("identity", "Juniper", "--profile", small, "--to", str(tmp_path / "new"))


def test_it_writes_conversations_and_a_run_and_shows_its_plan(terminal, tmp_path, small, words):
    facts = ("--maker", "Ada", "--fact", "best friend=Otto", "--fact", "color=green")
    lines = terminal.said(*words, *facts, "--depth", "1")
    settings = tmp_path / "new" / "juniper.toml"
    conversations = settings.with_suffix(".jsonl")
    assert lines[:2] == [f"{conversations}: written", f"{settings}: written"]
    plan = terminal.said("plan", str(settings))
    assert lines[3 : 3 + len(plan)] == plan
    assert "run juniper" in plan
    assert lines[-2].endswith(f"nanochat run {settings}")
    assert lines[-1].endswith("nanochat chat juniper")
    assert {"Ada made me.", "My best friend is Otto."} <= answers_in(conversations)
    # The command that the file names writes it again.
    text = settings.read_text(encoding="utf-8")
    assert "nanochat identity Juniper --maker Ada" in text
    assert f"--fact 'best friend=Otto' --fact color=green --profile {small} --depth 1" in text
    assert tomllib.loads(text)["name"] == "juniper"


def test_it_replaces_no_file_unless_asked_to_and_without_a_terminal_takes_the_defaults(
    terminal, tmp_path, words
):
    terminal.said(*words)
    path = tmp_path / "new" / "juniper.jsonl"
    before = path.read_bytes()
    assert "I am Juniper, a tiny language model." in answers_in(path)
    path.write_text("mine", encoding="utf-8")
    terminal.refuses(*words)
    assert path.read_text(encoding="utf-8") == "mine"
    terminal.said(*words, "--force")
    assert path.read_bytes() == before


def test_on_a_terminal_it_asks_and_the_end_of_the_input_ends_the_questions(
    terminal, tmp_path, words, monkeypatch
):
    typed, asked = ["Ada", "", "likes chess", "pet=a snail called Ben"], []

    def answer(prompt):
        asked.append(prompt)
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    terminal.said(*words, warns="'likes chess' is not of the form ABOUT=VALUE")
    assert len(asked) == 5
    assert "Juniper" in asked[1]
    expected = {"Ada made me.", "I am Juniper, a tiny language model."}
    found = answers_in(tmp_path / "new" / "juniper.jsonl")
    assert expected | {"My pet is a snail called Ben."} <= found
    # Not as the profile of another: the model would have two names.
    file = str(tmp_path / "new" / "juniper.toml")
    terminal.refuses("identity", "Bob", "--profile", file, "--to", str(tmp_path / "other"))


def test_a_mistake_ends_with_one_line_and_writes_nothing(terminal, tmp_path):
    to = ("--to", str(tmp_path / "new"))
    for words in (
        ("Juniper", "--fact", "green"),
        ("",),
        ("x" * 300,),
        ("Juniper", "--profile", "tyni"),
        ("Juniper", "--maker", ""),
    ):
        terminal.refuses("identity", *words, *to)
    assert not (tmp_path / "new").exists()
