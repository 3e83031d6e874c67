"""The worker itself downloads, is killed, is stopped, and goes on: real processes, real tables."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.shards import DATASETS
from nanochat_core.data.shard_files import ShardSet, read_batches, shard_name
from nanochat_core.job import Job, Result
from tests.support.nanochat_core.data.hub_server import HubServer

DATASET = DATASETS["fineweb-edu"]
SLOW = shard_name(DATASET.num_shards - 1)


def parquet(text: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [text]}), buffer, compression="none")
    return buffer.getvalue()


def start(job: Job, hub: HubServer) -> subprocess.Popen[bytes]:
    with (job.directory / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nanochat_core.worker", str(job.directory / "job.json")],
            env={**os.environ, **hub.environment},
            stderr=log,
        )


def wait_until(happened: Callable[[], bool], worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert worker.poll() is None, "it ended too soon"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_is_killed_and_one_that_is_stopped_lose_no_whole_shard(
    hub: HubServer, make_job
):
    files = {shard_name(n): parquet(f"shard {n}") for n in range(DATASET.num_shards)}
    hub.add(DATASET.repository, {**files, SLOW: parquet("long " * 400_000)})
    config = ShardsConfig(
        source="fineweb-edu", path=None, num_shards=12, snapshot=(), revision="main"
    )
    job = make_job("shards", {}, shards=config)
    job.write()

    def are_cached(slow: int) -> bool:
        """Return whether the fast shards are whole, and the slow one was begun `slow` times."""
        links = [p for p in (hub.home / "hub").rglob("snapshots/*/*") if p.is_symlink()]
        return len(links) == 12 and len(hub.downloads(SLOW)) >= slow

    hub.slow(SLOW, 2.0)  # four minutes
    worker = start(job, hub)
    wait_until(lambda: are_cached(1), worker)
    worker.kill()
    worker.wait()
    assert Result.find(job.directory) is None

    worker = start(job, hub)
    wait_until(lambda: are_cached(2), worker)
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=60)
    result = Result.find(job.directory)
    assert result is not None
    assert result.status == "interrupted"

    hub.heal()
    assert start(job, hub).wait(timeout=60) == 0, (job.directory / "worker.log").read_text()
    result = Result.find(job.directory)
    assert result is not None
    assert result.metrics["documents"] == 13
    made = ShardSet.open(job.output)
    texts = [text for path in made.train for group in read_batches(path) for text in group]
    assert texts == [f"shard {n}" for n in range(12)]
    assert [len(hub.downloads(shard_name(n))) for n in range(12)] == [1] * 12
