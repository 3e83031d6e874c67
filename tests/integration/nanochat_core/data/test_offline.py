"""What was downloaded is enough: after `task_data`, or with a warm cache, no network is used."""

import json
import socket

import numpy as np
import pytest
from huggingface_hub.utils import _http

from flows.datasets import with_snapshots
from nanochat_core.config import DatasetConfig, TaskDataConfig
from nanochat_core.data.conversations import task_data
from nanochat_core.data.conversations.chat_rows import conversation_rows
from nanochat_core.data.conversations.examples import open_task
from nanochat_core.data.hub.client import list_files
from nanochat_core.errors import DataError
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.mixtures.mixture import mixture
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.nanochat_core.data.published import publish
from tests.support.nanochat_core.network import NetworkUsed, pull_the_plug
from tests.support.tasks.rows import TRAINED_ON, rows_of

ROW_LEN = 257
PUBLISHED = sorted({*TRAINED_ON} - {"arc_easy"})  # which lies in one repository with the other
MADE = ("spelling", "simple_spelling", "spelling_bee", "arithmetic")


@pytest.fixture
def unplug(monkeypatch):
    """unplug(): from now on connections cannot be opened, nor names looked up."""
    return lambda: pull_the_plug(monkeypatch)


@pytest.fixture
def section(hub, tmp_path):
    """Published, made up and a person's own conversations."""
    for name in PUBLISHED:
        publish(hub, name, train=rows_of(name, 60), test=rows_of(name, 9, seed=1))
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(talk) + "\n" for _ in range(20)))

    def dataset(name, *, count=None, path=None, revision=None):
        return DatasetConfig(
            name=name, grade=1, num_train=count, num_test=count, path=path, revision=revision
        )

    return with_snapshots(
        TaskDataConfig(
            datasets=(
                *(dataset(name, revision="main") for name in PUBLISHED),
                *(dataset(name, count=30) for name in MADE),
                dataset("letters", path=str(own)),
            )
        )
    )


def test_what_midtraining_and_sft_do_with_data_needs_no_network(
    section, make_job, unplug, tmp_path
):
    job = make_job("task_data", {}, task_data=section)
    task_data.run(job)
    unplug()
    names = [dataset.name for dataset in section.datasets]
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    tokenizer.save(tmp_path)
    for split in ("train", "test"):
        tasks = [open_task(name, job.output, split) for name in names]
        mixed = mixture([(task.first(40), 2) for task in tasks], seed=1)
        assert len(mixed) == 2 * sum(min(len(task), 40) for task in tasks)
        rendered = [render_conversation(tokenizer, c, max_tokens=ROW_LEN) for c in mixed]
        rows = conversation_rows(mixed, tmp_path, tmp_path / split, row_len=ROW_LEN)
        _, mask = rows.take(np.arange(len(rows.tokens)))
        assert mask.sum() == sum(sum(mask) for _, mask in rendered) > 0


def test_the_network_is_really_gone(section, make_job, unplug):
    unplug()
    with pytest.raises((DataError, NetworkUsed)):
        task_data.run(make_job("task_data", {}, task_data=section))
    with pytest.raises(NetworkUsed):
        socket.create_connection(("127.0.0.1", 9))


def test_a_bad_line_in_task_data_is_an_error_of_data(tmp_path):
    path = tmp_path / "mmlu" / "train.jsonl"
    path.parent.mkdir()
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{}\n')
    task = open_task("mmlu", tmp_path, "train")
    assert len(task) == 2
    for bad in (lambda: task[1], lambda: list(task.examples[1:]), lambda: list(task.first(9))):
        refused(r"train\.jsonl:2: a conversation needs", bad, hint="--force task_data")
    refused(r"test\.jsonl cannot be read", open_task, "mmlu", tmp_path, "test")


@pytest.mark.parametrize("address", ["socks4://127.0.0.1:9", "http://host:port"])
def test_a_proxy_that_the_hubs_client_cannot_use_is_named(hub, monkeypatch, address):
    _http.close_session()  # the next one reads the environment
    monkeypatch.setenv("ALL_PROXY", address)
    given = ("me/data", "main", ["*"])
    refused("cannot be downloaded from http", list_files, *given, hint="ALL_PROXY")
