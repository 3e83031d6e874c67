"""The worker itself downloads, is killed, is stopped, and resumes: real processes, real tables."""

import os
import signal
import subprocess
import sys

from nanochat_core.data.hub.shards import DATASETS
from nanochat_core.data.shard_files import shard_name
from nanochat_core.job import Result
from tests.support.flows.waiting import wait_until
from tests.support.nanochat_core.data.fixtures import parquet_bytes, texts_of

DATASET = DATASETS["fineweb-edu"]
SLOW = shard_name(DATASET.num_shards - 1)


def parquet(text):
    return parquet_bytes({"text": [text]}, compression="none")


def start(job, hub):
    with (job.directory / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nanochat_core.worker", str(job.directory / "job.json")],
            env={**os.environ, **hub.environment},
            stderr=log,
        )


def test_a_worker_that_is_killed_and_one_that_is_stopped_lose_no_whole_shard(hub, shards_job):
    files = {shard_name(n): parquet(f"shard {n}") for n in range(DATASET.num_shards)}
    hub.add(DATASET.repository, {**files, SLOW: parquet("long " * 400_000)})
    job = shards_job("fineweb-edu", num_shards=12, revision="main")
    job.write()

    def are_cached(slow):
        """Return whether the fast shards are whole, and the slow one was begun `slow` times."""
        assert worker.poll() is None, "it ended too soon"
        links = [p for p in (hub.home / "hub").rglob("snapshots/*/*") if p.is_symlink()]
        return len(links) == 12 and len(hub.downloads(SLOW)) >= slow

    hub.slow(SLOW, 2.0)  # four minutes
    worker = start(job, hub)
    wait_until(lambda: are_cached(1))
    worker.kill()
    worker.wait()
    assert Result.find(job.directory) is None

    worker = start(job, hub)
    wait_until(lambda: are_cached(2))
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=60)
    result = Result.find(job.directory)
    assert result.status == "interrupted"

    hub.heal()
    assert start(job, hub).wait(timeout=60) == 0, (job.directory / "worker.log").read_text()
    result = Result.find(job.directory)
    assert result.metrics["documents"] == 13
    assert texts_of(job.output)[:-1] == [f"shard {n}" for n in range(12)]
    assert [len(hub.downloads(shard_name(n))) for n in range(12)] == [1] * 12
