"""metrics.parquet says what events.jsonl says, a row a step."""

import json

import pytest

from nanochat_core.runtime.metrics import FILE, write_metrics
from tests.support.small_job import small_job


@pytest.fixture
def job(tmp_path):
    return small_job(tmp_path)


def report(job, *events):
    with job.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_a_row_a_step_and_of_steps_done_again_the_last(job):
    pq = pytest.importorskip("pyarrow.parquet")
    report(
        job,
        {"time": 9.0, "kind": "eval", "step": 0, "values": {"val_bpb": 3.0}},
        {"time": 10.0, "kind": "start", "step": 0, "total": 3, "unit": "step", "resumed": False},
        {"time": 11.0, "kind": "step", "step": 1, "total": 3, "values": {"loss": 5.0}},
        {"time": 12.0, "kind": "step", "step": 2, "total": 3, "values": {"loss": 4.0}},
        {"time": 12.5, "kind": "message", "text": "stopped"},
        {"time": 30.0, "kind": "start", "step": 1, "total": 3, "unit": "step", "resumed": True},
        {"time": 32.0, "kind": "step", "step": 2, "total": 3, "values": {"loss": 4, "mfu": 0.5}},
        {"time": 33.0, "kind": "eval", "step": 2, "values": {"val_bpb": 2.0}},
    )
    with job.events.open("a") as file:
        file.write('{"kind": "st')  # by a job that was killed
    path = write_metrics(job)
    assert path == job.directory / FILE
    base = {"val_bpb": None, "loss": None, "mfu": None, "time": None, "seconds": None}
    assert pq.read_table(path).to_pylist() == [
        {**base, "step": 0, "val_bpb": 3.0},
        {**base, "step": 1, "loss": 5.0, "time": 11.0, "seconds": 1.0},
        {"step": 2, "loss": 4.0, "mfu": 0.5, "val_bpb": 2.0, "time": 32.0, "seconds": 2.0},
    ]
    assert [p.name for p in job.directory.iterdir() if p.name.startswith(".")] == []


def test_a_stage_without_steps_has_no_table(job):
    assert write_metrics(job) is None
    report(job, {"time": 1.0, "kind": "message", "text": "hello"})
    assert write_metrics(job) is None


def test_events_that_make_no_table_fail_nothing(job, capsys):
    report(job, {"time": 1.0, "kind": "step", "step": 1, "total": 9, "values": {"loss": "a lot"}})
    assert write_metrics(job) is None
    assert "metrics.parquet was not written" in capsys.readouterr().err
