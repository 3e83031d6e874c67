import signal
import subprocess
import sys

import pytest

from nanochat_core.data import tokens as tokenize
from nanochat_core.data.token_files import TokenSet
from nanochat_core.job import Result
from tests.support.flows.waiting import wait_until
from tests.unit.nanochat_core.data.test_array_files import SHORT, files_of_at_most


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_job_that_is_asked_to_stop_stops_at_once_and_resumes_later(
    make_job, write_shards, tokenizer_dir
):
    documents = [f"word{i} is word{i * 3} and more of it" for i in range(80_000)]
    shards = write_shards([["short"], documents, documents, ["validation"]])
    job = make_job("tokens", {"shards": shards, "tokenizer": tokenizer_dir})
    arguments = [sys.executable, "-m", "nanochat_core.worker", str(job.write())]
    with subprocess.Popen(arguments) as worker:
        wait_until((job.output / "shard_00000.lengths.npy").exists)
        wait_until(lambda: list((job.directory / "scratch").glob("shard_0000[12]")))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=120) == 75
    result = Result.find(job.directory)
    assert result.status == "interrupted"
    assert not (job.output / "tokens.json").exists()
    tokenize.run(job)
    assert TokenSet.open(job.output).shards[1].documents == len(documents)


def test_the_error_of_a_full_disk_keeps_its_number_from_another_process(
    make_job, write_shards, tokenizer_dir, monkeypatch
):
    job = make_job("tokens", {"shards": write_shards([SHORT] * 3), "tokenizer": tokenizer_dir})
    monkeypatch.setattr(tokenize, "usable_cores", lambda: 2)
    with files_of_at_most(2000):
        tokenize.run(job)
    assert list(job.output.iterdir()) == []
