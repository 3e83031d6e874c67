"""What was downloaded is enough: after `task_data`, or with a warm cache, no network is used."""

import json
import socket
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub.utils import _http

from flows.datasets import with_snapshots
from nanochat_core.config import TaskDataConfig
from nanochat_core.data.conversations import task_data
from nanochat_core.data.conversations.chat_rows import conversation_rows
from nanochat_core.data.conversations.examples import open_task
from nanochat_core.data.hub.client import list_files
from nanochat_core.scaling import dataset
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.mixtures.mixture import mixture
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.nanochat_core.data.published import publish
from tests.support.nanochat_core.network import NetworkUsed, pull_the_plug
from tests.support.tasks.rows import rows_of


def test_what_midtraining_and_sft_do_with_data_needs_no_network(
    hub, make_job, monkeypatch, tmp_path
):
    """With published, synthetic and a person's own conversations."""
    publish(hub, "gsm8k", train=rows_of("gsm8k", 60), test=rows_of("gsm8k", 9, seed=1))
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(talk) + "\n" for _ in range(20)))
    datasets = (
        replace(dataset("gsm8k"), revision="main"),
        dataset("spelling", num_train=30, num_test=30),
        replace(dataset("letters"), path=str(own)),
    )
    section = with_snapshots(TaskDataConfig(datasets=datasets))
    job = make_job("task_data", {}, task_data=section)
    task_data.run(job)
    pull_the_plug(monkeypatch)
    with pytest.raises(NetworkUsed):
        socket.create_connection(("127.0.0.1", 9))
    Tokenizer({bytes([i]): i for i in range(256)}).save(tmp_path)
    tasks = [open_task(dataset.name, job.output, "train") for dataset in datasets]
    mixed = mixture([(task.first(40), 2) for task in tasks], seed=1)
    assert len(mixed) == 2 * sum(min(len(task), 40) for task in tasks)
    rows = conversation_rows(mixed, tmp_path, tmp_path / "rows", row_len=257)
    assert rows.take(np.arange(len(rows.tokens)))[1].sum() > 0


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
