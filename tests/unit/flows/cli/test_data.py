"""`nanochat data`: tokens and loss mask of one conversation."""

from pathlib import Path

import pytest

from flows.overrides import default_name
from infra.storage.base import Store
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.flows.rows import publish_directory
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal
from tests.support.tasks.example_files import write_examples

CALL = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "7+5"},
    {"type": "python_output", "text": "12"},
]
HOSTILE = "\x1b]0;owned\x07\r\u202egnp" + "long " * 500
EXAMPLES = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {"messages": [{"role": "user", "content": "7+5?"}, {"role": "assistant", "content": CALL}]},
    {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "no"}]},
]
USES = ("task_data@tiny",)
GIVEN = default_name("tiny", use=USES)


@pytest.fixture(autouse=True)
def runs_with_examples(store: Store, tmp_path: Path) -> None:
    tokens, data = tmp_path / "tokenizer", tmp_path / "data"
    tokens.mkdir()
    (data / "arithmetic").mkdir(parents=True)
    Tokenizer({bytes([byte]): byte for byte in range(256)}).save(tokens)
    for split in ("train", "test"):
        write_examples(data / "arithmetic" / f"{split}.jsonl", EXAMPLES)
    (data / "broken").mkdir()
    (data / "broken" / "train.jsonl").write_text('{"messages": 3}\n')
    made = (
        publish_directory(store, "tokenizer", tokens),
        publish_directory(store, "task_data", data),
    )
    put_run(store, "tiny-1", *made)
    put_run(store, "mine-1", *made, name="mine", profile="d12", depth=6, overrides=("seed=2",))
    put_run(store, f"{GIVEN}-1", *made, name=GIVEN, uses=USES)


def test_what_is_learnt_is_marked(terminal: Terminal):
    head, text = terminal.said("data", "arithmetic", "--index", "1")
    assert head == "arithmetic train 1: 24 tokens, 12 of them learnt"
    assert text == (
        "<|bos|><|user_start|>7+5?<|user_end|><|assistant_start|>"
        "{+It is <|python_start|>7+5<|python_end|>+}<|output_start|>12<|output_end|>"
        "{+<|assistant_end|>+}"
    )


def test_text_of_a_dataset_is_shown_whole_and_cannot_move_the_cursor(terminal: Terminal):
    text = "\n".join(terminal.said("data", "arithmetic", "--index", "2"))
    assert "\\x1b]0;owned\\x07\\x0d\\u202egnp" in text
    assert text.count("long ") == HOSTILE.count("long ")
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("run", "command"),
    [
        ("tiny", "nanochat run tiny --force task_data"),
        ("mine", "nanochat run d12 --depth 6 --set seed=2 --force task_data --name mine"),
        (GIVEN, f"nanochat run tiny --force task_data --name {GIVEN}"),
    ],
)
def test_a_broken_example_names_the_command_that_makes_its_run_again(
    terminal: Terminal, run: str, command: str
):
    error, hint = terminal.fails("data", "broken", "--run", run)
    assert "train.jsonl" in error
    assert hint == f"make them again: {command}"


def test_programs_get_ids_and_mask(terminal: Terminal):
    tree = terminal.read("data", "arithmetic", "--split", "test")
    assert tree["conversation"] == EXAMPLES[0]
    assert len(tree["ids"]) == len(tree["mask"])
    assert sum(tree["mask"]) == 3  # y, o and the end


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("arithmetik",), "there is no dataset 'arithmetik'", "did you mean 'arithmetic'?"),
        (("arithmetic", "--index", "3"), "--index is 3, arithmetic has 3 examples", "first is 0"),
        (("arithmetic", "--index", "-1"), "--index is -1", "first is 0"),
        (("arithmetic", "--run", "tiney"), "tiney", ""),
    ],
)
def test_a_mistake_is_one_line(terminal: Terminal, words: tuple[str, ...], error: str, hint: str):
    said, advice = terminal.fails("data", *words)
    assert error in said
    assert hint in advice
