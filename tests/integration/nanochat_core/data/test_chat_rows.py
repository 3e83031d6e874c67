import random
import signal
import subprocess
import sys

import numpy as np
import pytest

from nanochat_core.data.conversations import chat_rows
from nanochat_core.data.conversations.chat_rows import conversation_rows
from tasks.kinds.files import open_task, write_examples
from tasks.mixtures.mixture import mixture

BOS = 0


def conversations(lengths, seed=0):
    """(ids, mask) of each length; ids after BOS are never BOS, so that rows can be cut again."""
    rng = random.Random(seed)
    return [
        ([BOS, *(rng.randint(1, 999) for _ in range(n - 1))], [0, *rng.choices((0, 1), k=n - 1)])
        for n in lengths
    ]


def cut(packed):
    """The conversations in packed rows, by their BOS; a BOS alone is padding."""
    for tokens, mask in zip(*(array.tolist() for array in packed), strict=True):
        starts = [i for i, token in enumerate(tokens) if token == BOS]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if end - start > 1:
                yield tokens[start:end], mask[start:end]
            else:
                assert mask[start] == 0


@pytest.fixture
def talk(tmp_path):
    """A mixture in files, in which each conversation comes twice."""
    rng = random.Random(4)
    words = [f"word{i}" for i in range(40)]

    def turn(role):
        return {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 30)))}

    (tmp_path / "talk").mkdir()
    write_examples(
        tmp_path / "talk" / "train.jsonl",
        ({"messages": [turn("user"), turn("assistant")]} for _ in range(60)),
    )
    return mixture([(open_task("talk", tmp_path, "train"), 2)], seed=5)


def test_what_a_killed_attempt_left_is_removed_and_what_another_one_makes_is_not(
    talk, tokenizer_dir, tmp_path
):
    killed = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from nanochat_core.data.conversations import chat_rows\n"
        "def last_moment(directory):\n"
        "    if directory.name == 'made': os.kill(os.getpid(), signal.SIGKILL)\n"
        "chat_rows.sync_directory = last_moment\n"
        "talk = [{'messages': [{'role': 'user', 'content': 'a'},"
        " {'role': 'assistant', 'content': 'b'}]}]\n"
        "root = Path(sys.argv[1])\n"
        "chat_rows.conversation_rows(talk, root / 'tokenizer', root / 'rows', row_len=64)\n"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
        assert done.returncode == -signal.SIGKILL
        assert not (tmp_path / "rows").exists()
        assert [path.name[:6] for path in tmp_path.glob(".*")] == [".rows-"]  # not one a kill
    (tmp_path / ".held_out-x1y2z3").mkdir()  # of another node of the same job
    conversation_rows(talk, tokenizer_dir, tmp_path / "rows", row_len=64)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".held_out-x1y2z3", "rows", "talk", "tokenizer"]


def test_two_processes_pack_like_one(talk, tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_rows, "_PIECE", 17)
    one, two = (
        conversation_rows(talk, tokenizer_dir, tmp_path / f"rows{n}", row_len=101, processes=n)
        for n in (1, 2)
    )
    every = np.arange(len(one.tokens))
    for array, same in zip(one.take(every), two.take(every), strict=True):
        assert array.tolist() == same.tolist()
