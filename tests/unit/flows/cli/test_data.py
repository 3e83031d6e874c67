"""`nanochat data`: tokens and loss mask of one conversation."""

import pytest

from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.flows.rows import publish_directory
from tests.support.flows.shelf import put_run
from tests.support.tasks.example_files import write_examples

CALL = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "7+5"},
    {"type": "python_output", "text": "12"},
]
HOSTILE = "\x1b]0;owned\x07\r\u202egnp" + "long " * 500
EXAMPLES = [
    {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
    for user, answer in (("hi", "yo"), ("7+5?", CALL), (HOSTILE, "no"))
]


@pytest.fixture(autouse=True)
def runs_with_examples(store, tmp_path):
    tokens, data = tmp_path / "tokenizer", tmp_path / "data"
    tokens.mkdir()
    (data / "arithmetic").mkdir(parents=True)
    Tokenizer({bytes([byte]): byte for byte in range(256)}).save(tokens)
    for split in ("train", "test"):
        write_examples(data / "arithmetic" / f"{split}.jsonl", EXAMPLES)
    (data / "broken").mkdir()
    (data / "broken" / "train.jsonl").write_text('{"messages": 3}\n')
    folders = {"tokenizer": tokens, "task_data": data}
    made = [publish_directory(store, name, folder) for name, folder in folders.items()]
    put_run(store, "tiny-1", *made)


def test_what_is_learnt_is_marked_and_text_cannot_move_the_cursor(terminal):
    terminal.shows("data arithmetic --index 1")
    terminal.shows("data arithmetic --index 2")


def test_programs_get_ids_and_mask(terminal):
    tree = terminal.read("data", "arithmetic", "--split", "test")
    assert tree["conversation"] == EXAMPLES[0]
    assert len(tree["ids"]) == len(tree["mask"])
    assert sum(tree["mask"]) == 3  # y, o and the end


def test_a_mistake_and_a_broken_example_are_one_line(terminal):
    for words in ("broken", "arithmetik", "arithmetic --index 3", "arithmetic --index -1"):
        terminal.refuses(f"data {words}")
    terminal.refuses("data arithmetic --run tiney")
