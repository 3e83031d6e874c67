import json
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core import scaling
from nanochat_core.config import TaskDataConfig
from nanochat_core.data.conversations import task_data
from nanochat_core.data.conversations.disk_shuffle import Spool
from nanochat_core.data.conversations.task_download import convert_split
from nanochat_core.runtime.progress import read_events
from tasks.kinds.files import open_task
from tasks.registry import task_named
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.nanochat_core.data.published import publish
from tests.support.tasks.peer import parquet_of, run_peer
from tests.support.tasks.rows import ROWS, TRAINED_ON, rows_of

TRAIN = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")


def dataset(name, commit, **counts):
    return replace(scaling.dataset(name, **counts), revision=commit)


def run(make_job, *datasets):
    section = TaskDataConfig(datasets=datasets, core_bundle=None, core_bundle_sha256=None)
    job = make_job("task_data", {}, task_data=section)
    return job, task_data.run(job)


def described(job):
    return json.loads((job.output / "task_data.json").read_text())["datasets"]


def examples(job, name, split):
    return list(open_task(name, job.output, split).examples)


@pytest.mark.parametrize("name", TRAINED_ON)
def test_a_dataset_is_downloaded_converted_and_reported(hub, make_job, name):
    train, test = rows_of(name, 200), rows_of(name, 30, seed=1)
    commit = publish(hub, name, train=train, test=test)
    job, metrics = run(make_job, dataset(name, "main"))
    convert = task_named(name).convert
    for split, rows in (("train", train), ("test", test)):
        order = np.random.default_rng(42).permutation(len(rows))
        assert examples(job, name, split) == [convert(rows[i]) for i in order]
    assert described(job)[name] == {
        "kind": "published",
        "repository": task_named(name).dataset.repository,
        "revision": "main",
        "commit": commit,
        "rows": {"train": 200, "test": 30},
        "train": 200,
        "test": 30,
        "overlap": metrics.get(f"{name}_overlap", 0),
    }
    assert metrics[f"{name}_commit"] == commit
    assert (metrics[f"{name}_train"], metrics[f"{name}_test"]) == (200, 30)
    assert not hub.downloads("other/")


def test_the_first_so_many_are_a_prefix_and_a_split_may_be_left_out(hub, make_job):
    commit = publish(hub, "gsm8k", train=rows_of("gsm8k", 100), test=rows_of("gsm8k", 9))
    job, _ = run(make_job, dataset("gsm8k", commit))
    everything = examples(job, "gsm8k", "train")
    downloads = len(hub.downloads())
    job, _ = run(make_job, dataset("gsm8k", commit, num_train=30, num_test=0))
    assert examples(job, "gsm8k", "train") == everything[:30]
    assert examples(job, "gsm8k", "test") == []
    assert described(job)["gsm8k"]["rows"] == {"train": 100, "test": 0}
    assert len(hub.downloads()) == downloads  # the cache has them


def test_a_split_that_is_not_used_is_not_downloaded_and_one_that_does_not_exist_is_empty(
    hub, make_job
):
    publish(hub, "mmlu", train=rows_of("mmlu", 50), test=rows_of("mmlu", 9))
    run(make_job, dataset("mmlu", "main", num_train=0))
    assert {r.file for r in hub.downloads()} == {"all/test-00000-of-00001.parquet"}
    publish(hub, "humaneval", test=rows_of("humaneval", 5))
    job, metrics = run(make_job, dataset("humaneval", "main"))
    assert (metrics["humaneval_train"], metrics["humaneval_test"]) == (0, 5)
    assert examples(job, "humaneval", "train") == []


def test_what_is_asked_in_both_splits_is_counted_reported_and_kept(hub, make_job):
    rows = rows_of("arc_easy", 60)
    publish(hub, "arc_easy", train=rows, test=[*rows[:4], *rows_of("arc_easy", 6, seed=9)])
    job, metrics = run(make_job, dataset("arc_easy", "main"))
    assert metrics["arc_easy_overlap"] == described(job)["arc_easy"]["overlap"] == 4
    assert len(examples(job, "arc_easy", "test")) == 10
    messages = [e["text"] for e in read_events(job.events) if e["kind"] == "message"]
    assert messages[-1].endswith("10 to test with, 4 of which ask what a training example asks")


@pytest.mark.parametrize("where", [0, 70, 119])
def test_a_row_that_is_no_conversation_is_named_and_nothing_is_written(hub, make_job, where):
    rows = rows_of("mmlu", 120)
    rows[where] |= {"answer": 7}
    commit = publish(hub, "mmlu", train=rows, test=rows_of("mmlu", 5))
    file, row = (TRAIN[0], where) if where < 40 else (TRAIN[1], where - 40)
    name = f"all/auxiliary_{file}"
    complaint = f"^cais/mmlu: {name} row {row}: answer is 7, expected 0 to 3$"
    refused(complaint, run, make_job, dataset("mmlu", "main"), hint=commit[:12])
    assert list(make_job("task_data", {}).output.iterdir()) == []


def test_a_file_that_is_no_parquet_is_named(hub, make_job):
    dataset_of = task_named("gsm8k").dataset
    hub.add(
        dataset_of.repository,
        {"main/train-0.parquet": b"PAR1 nonsense", "main/test-0.parquet": b""},
    )
    complaint = r"openai/gsm8k: main/train-0\.parquet cannot be read as"
    refused(complaint, run, make_job, dataset("gsm8k", "main"))


def test_the_revision_in_tasks_is_asked_for_unless_the_config_has_another(hub, make_job):
    publish(hub, "gsm8k", train=rows_of("gsm8k", 30), test=rows_of("gsm8k", 3))
    revision = task_named("gsm8k").dataset.revision
    refused(f"no such revision: .* {revision[:12]}", run, make_job, dataset("gsm8k", None))


def test_a_dataset_that_is_done_is_not_asked_for_again_after_a_failure(hub, make_job):
    publish(hub, "gsm8k", train=rows_of("gsm8k", 30), test=rows_of("gsm8k", 3))
    wanted = (dataset("gsm8k", "main"), dataset("smoltalk", "main"))
    refused("smol-smoltalk", run, make_job, *wanted)
    publish(hub, "smoltalk", train=rows_of("smoltalk", 30), test=rows_of("smoltalk", 3))
    before = len(hub.requests)
    job, _ = run(make_job, *wanted)
    assert not [r for r in hub.requests[before:] if "gsm8k" in r.path]
    assert sorted(described(job)) == ["gsm8k", "smoltalk"]


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_examples_and_their_order_are_nanochats(hub, make_job, tmp_path, name):
    rows = rows_of(name, 150)
    split = "train" if name in TRAINED_ON else "test"
    publish(
        hub, name, **({"train": rows, "test": rows[:3]} if split == "train" else {"test": rows})
    )
    files = [parquet_of(rows[:50]), parquet_of(rows[50:])]
    peers_split = "auxiliary_train" if name == "mmlu" else split
    theirs, _ = run_peer(name, files, tmp_path / "peer", split=peers_split)
    job, _ = run(make_job, dataset(name, "main"))
    ours = examples(job, name, split)
    assert ours == theirs
    assert ours != [task_named(name).convert(row) for row in rows]


def peaks(directory, count):
    """Return the most MB that Python, and Arrow in this process so far, held for so many rows."""
    directory.mkdir()
    rng = random.Random(0)
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("messages", pa.list_(message))])
    talks = [
        [{"role": r, "content": rng.randbytes(1000).hex()} for r in ("user", "assistant")]
        for _ in range(1000)
    ]
    with pq.ParquetWriter(directory / "rows", schema, use_dictionary=False) as writer:
        for _ in range(count // 1000):
            writer.write_table(pa.table({"messages": talks}, schema=schema))
    given = (task_named("smoltalk"), [("rows", directory / "rows")])
    tracemalloc.start()
    with Spool(directory / "lines") as spool:
        split, rows = convert_split(*given, spool, num_examples=None, commit="0" * 40)
        split.write(directory / "train.jsonl", scratch=directory)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == count
    return held >> 20, pa.default_memory_pool().max_memory() >> 20


def test_memory_does_not_grow_with_the_dataset(tmp_path):
    """Ten times the rows: 80 MB of text."""
    few, many = (peaks(tmp_path / str(count), count) for count in (2_000, 20_000))
    assert many[0] < few[0] + 10
    assert many[1] < few[1] + 20
