import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nanochat_core.data.row_files import Rows
from nanochat_core.errors import DataError
from nanochat_core.evaluate import base
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.row_files import write_rows

pytestmark = pytest.mark.torch

CONFIG = {"base_eval": {"eval_tokens": 128, "prompts": ["one", "the \u00e9"], "max_new_tokens": 6}}


@pytest.fixture
def make(make_job, model_dir, rows_dir, task_data_dir):
    def make_base_job(name="base_eval", *, config=CONFIG, inputs=None, **resources):
        inputs = {
            **{"pretrain": model_dir, "rows": rows_dir, "task_data": task_data_dir},
            **(inputs or {}),
        }
        return make_job(name, "nanochat_core.evaluate.base", inputs, config, **resources)

    return make_base_job


def test_it_leaves_scores_samples_and_metrics(make, model, tokenizer, rows_dir):
    job = make()
    metrics = base.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    assert scores["core"] is scores["suite"] is None
    messages = [e["text"] for e in read_events(job.events) if "text" in e]
    assert any("CORE skipped" in text for text in messages)
    assert any(" in fp32 (" in text for text in messages)  # which runner answers, and why it
    assert pq.read_table(job.output / "examples.parquet").num_rows == 0
    losses = pq.read_table(job.output / "losses.parquet").to_pylist()
    for split in ("val", "train"):
        assert scores[f"{split}_bpb"] == metrics[f"{split}_bpb"]
        of_split = [row for row in losses if row["split"] == split]
        assert [row["place"] for row in of_split] == list(range(4))  # 128 tokens, 32 a row
        nats, num_bytes = (sum(row[name] for row in of_split) for name in ("nats", "bytes"))
        assert nats / math.log(2) / num_bytes == pytest.approx(scores[f"{split}_bpb"], rel=1e-4)
        low, high = scores["intervals"][f"{split}_bpb"]
        assert low < scores[f"{split}_bpb"] < high
        rows = Rows.open(rows_dir, split)
        expected = measure(model, tokenizer, rows, num_tokens=128, batch_size=1)
        assert metrics[f"{split}_bpb"] == pytest.approx(
            expected, abs=1e-5
        )  # scores have 5 decimals
    lines = (job.output / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["prompt"] for sample in samples] == ["one", "the \u00e9"]
    assert all(sample["text"] for sample in samples)
    assert [e["step"] for e in read_events(job.events) if e["kind"] == "step"] == [1, 2, 3]


def test_bits_per_byte_use_the_attention_and_the_kernels_of_training(make, monkeypatch):
    def compiled(model, *, by_block, autotune):
        chosen.append("compiled")

    chosen = []
    monkeypatch.setattr(base, "choose", lambda name, *args, **rest: chosen.append(name))
    monkeypatch.setattr(GPT, "compile_passes", compiled)
    base.run(make(attention="sdpa", compile=True))
    assert chosen == ["sdpa", "compiled"]


def test_two_runs_leave_the_same_bytes(make):
    jobs = [make("first"), make("second", device_batch_size=1)]
    for job in jobs:
        base.run(job)
    for name in ("scores.json", "samples.jsonl", "examples.parquet", "losses.parquet"):
        first, second = ((job.output / name).read_bytes() for job in jobs)
        assert first == second


def test_rows_of_another_length_than_the_models_are_reported(make, tokenizer, tmp_path):
    def rows_of(length):
        ids = np.arange(3 * (length + 1)).reshape(3, -1) % tokenizer.vocab_size
        return write_rows(tmp_path / f"rows-{length}", tokenizer, {"train": ids, "val": ids})

    config = {"base_eval": {**CONFIG["base_eval"], "prompts": []}}
    job = make("short", config=config)
    base.run(job)
    assert (job.output / "samples.jsonl").read_bytes() == b""  # of no prompts
    said = [e["text"] for e in read_events(job.events) if "text" in e]
    assert any("sequence_len 32, the model reads 256" in text for text in said)
    job = make("fit", inputs={"rows": rows_of(256)})
    base.run(job)
    assert not any("sequence_len" in e.get("text", "") for e in read_events(job.events))
    with pytest.raises(DataError, match="sequence_len 257, the model reads 256"):
        base.run(make("long", inputs={"rows": rows_of(257)}))


# Bits per byte.


@pytest.fixture
def rows(rows_dir):
    return Rows.open(rows_dir, "val")


def straight_line(model, tokenizer, rows, num_rows):
    """Bits per byte, one target at a time in float64."""
    nats = num_bytes = 0.0
    for row in rows.ids[:num_rows].astype(int).tolist():
        logits = model(torch.tensor([row[:-1]]))[0].double()
        for position, target in enumerate(row[1:]):
            if target < tokenizer.vocab_size - 9:
                nats -= torch.log_softmax(logits[position], dim=-1)[target].item()
                num_bytes += len(tokenizer.decode_bytes([target]))
    return nats / math.log(2) / num_bytes


def measure(model, tokenizer, rows, *, num_tokens=7 * 32, batch_size=3):
    return bits_per_byte(
        model,
        rows,
        tokenizer.token_bytes(),
        num_tokens=num_tokens,
        batch_size=batch_size,
        world=ALONE,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "batch_size"),
    [(7 * 32, 7, 3), (10**9, 7, 100), (3 * 32, 3, 1), (3 * 32 + 31, 3, 2), (1, 1, 7)],
)
def test_it_is_the_sum_of_bits_over_the_sum_of_bytes(
    model, tokenizer, rows, num_tokens, num_rows, batch_size
):
    found = measure(model, tokenizer, rows, num_tokens=num_tokens, batch_size=batch_size)
    with torch.no_grad():
        expected = straight_line(model, tokenizer, rows, num_rows)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_model_stays_in_its_mode(model, tokenizer, rows):
    try:
        model.train()
        measure(model, tokenizer, rows)
        assert model.training
    finally:
        model.eval()
    measure(model, tokenizer, rows)
    assert not model.training
