import signal
import subprocess
import sys

import numpy as np

from nanochat_core.data.conversations import chat_rows
from nanochat_core.data.conversations.chat_rows import conversation_rows
from tests.unit.nanochat_core.data.test_chat_rows import talk

__all__ = ["talk"]


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
