"""nanochat's own tasks on rows of ours, to compare with: from the checkout that NANOCHAT_DIR names.

It runs in a process of its own: its package is called `tasks` too.
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PEERS = {  # our name -> its module, class and arguments; its folder of a split's parquet files
    "mmlu": ("mmlu", "MMLU", {"subset": "all"}, "cais--mmlu/all"),
    "arc_easy": ("arc", "ARC", {"subset": "ARC-Easy"}, "allenai--ai2_arc/ARC-Easy"),
    "arc_challenge": ("arc", "ARC", {"subset": "ARC-Challenge"}, "allenai--ai2_arc/ARC-Challenge"),
    "gsm8k": ("gsm8k", "GSM8K", {"subset": "main"}, "openai--gsm8k/main"),
    "smoltalk": ("smoltalk", "SmolTalk", {}, "HuggingFaceTB--smol-smoltalk/default"),
    "humaneval": ("humaneval", "HumanEval", {}, "openai--openai_humaneval/openai_humaneval"),
}
_CODE = """
import importlib, json, sys
module, kind, options, answers = json.load(sys.stdin)
task = getattr(importlib.import_module("tasks." + module), kind)(**options)
conversations = [task[i] for i in range(len(task))]
tried = [answers or c.get("letters", []) for c in conversations]
verdicts = [[bool(task.evaluate(c, a)) for a in tried[i]] for i, c in enumerate(conversations)]
json.dump([conversations, verdicts], sys.stdout)
"""


def peer_directory() -> Path:
    """The checkout. Skips the test where there is none."""
    if "NANOCHAT_DIR" not in os.environ:
        pytest.skip("NANOCHAT_DIR names no checkout of nanochat")
    return Path(os.environ["NANOCHAT_DIR"]).resolve()


def run_peer(
    name: str,
    files: Sequence[bytes],
    directory: Path,
    *,
    split: str = "test",
    answers: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], list[list[bool]]]:
    """The conversations it makes of parquet files, in its order; which answers it calls right.

    Answers are the ones given, or a question's letters: it takes no others.
    """
    module, kind, options, folder = PEERS[name]
    if name != "humaneval":  # all of it is for testing
        options = {**options, "split": split}
    place = directory / "task_data" / folder / split
    place.mkdir(parents=True)
    names = [f"{i:05d}.parquet" for i in range(len(files))]
    for file, data in zip(names, files, strict=True):
        (place / file).write_bytes(data)
    (place / "manifest.json").write_text(json.dumps(names))
    done = subprocess.run(
        [sys.executable, "-B", "-c", _CODE],
        cwd=peer_directory(),
        input=json.dumps([module, kind, options, answers]),
        env={**os.environ, "NANOCHAT_BASE_DIR": str(directory), "PYTHONPATH": "."},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    conversations, verdicts = json.loads(done.stdout)
    return conversations, verdicts


def parquet_of(rows: Sequence[Mapping[str, Any]], *, row_group_size: int = 1000) -> bytes:
    """A parquet file of these rows."""
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream, row_group_size=row_group_size)
    return stream.getvalue()
