"""nanochat itself, to compare with, and its tasks on rows of ours; its package is `tasks` too."""

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


def run_nanochat(
    code: str,
    *arguments: object,
    variable: str = "NANOCHAT_DIR",
    given: str = "",
    **environment: str,
) -> str:
    """Run code in the checkout that a variable names, in a process of its own, and return what it
    prints. Skips the test where there is none."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout of nanochat")
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *map(str, arguments)],
        cwd=os.environ[variable],
        input=given,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout


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
    given = json.dumps([module, kind, options, answers])
    environment = {"NANOCHAT_BASE_DIR": str(directory), "PYTHONPATH": "."}
    conversations, verdicts = json.loads(run_nanochat(_CODE, given=given, **environment))
    return conversations, verdicts


def parquet_of(rows: Sequence[Mapping[str, Any]], *, row_group_size: int = 1000) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream, row_group_size=row_group_size)
    return stream.getvalue()
