"""What holds for whole stages: signs of life, two ranks, no network, inputs that fit."""

import itertools
import socket
import time

import pytest

from infra.launch.torchrun import run_job
from infra.launch.watchdog import Watchdog, heartbeats_of
from nanochat_core.errors import DataError
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.heartbeat import HEARTBEAT, HeartbeatWriter, read_heartbeats
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.loop import checkpointer
from tests.support.nanochat_core.network import NetworkUsed, pull_the_plug
from tests.support.nanochat_core.train.fixtures import are_even

pytestmark = pytest.mark.torch
GPU_STAGES = ("pretrain", "base_eval", "midtrain", "sft", "rl", "chat_eval_sft")


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_a_stage_that_holds_a_gpu_needs_no_network(bench, stage, monkeypatch):
    job = bench.job(stage)
    pull_the_plug(monkeypatch)
    with pytest.raises(NetworkUsed):
        socket.create_connection(("127.0.0.1", 9))
    bench.run(job)
    assert any(job.output.iterdir())


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_two_ranks_equal_one(bench, stage):
    one, _ = bench.done(stage, "one")
    two = bench.job(stage, "two")
    run_job(two, processes=2, on_event=lambda event: None)
    for kind in ("step", "eval"):
        alone, together = (bench.values(job, kind) for job in (one, two))
        assert alone.keys() == together.keys()
        for step, values in alone.items():
            values.pop("tokens_per_second", together[step].pop("tokens_per_second", None))
            # Rounding grows fivefold a step here: by the sixth, one process with another device
            # batch size is 2e-5 away as well.
            tolerance = 1e-5 if step <= 4 else 1e-4
            assert together[step] == pytest.approx(values, rel=tolerance), f"{kind} {step}"


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rl"])
def test_every_pass_through_the_model_begins_with_a_sign_of_life(bench, stage, monkeypatch):
    """So that none is missed, however many of them make up a step."""
    noted = []

    def noting(real):
        return lambda *given: (noted.append("pass"), real(*given))[1]

    monkeypatch.setattr(HeartbeatWriter, "beat", lambda *given, **named: noted.append("beat"))
    for name in ("token_losses", "summed_loss"):
        monkeypatch.setattr(GPT, name, noting(getattr(GPT, name)))
    monkeypatch.setattr(rl, "are_correct", are_even)
    # An update against a reference and an older policy too: more passes than one kind.
    section = {"updates_per_batch": 2, "clip": 0.2, "kl_weight": 0.1} if stage == "rl" else None
    bench.done(stage, section=section, device_batch_size=1)
    passes = [len(list(group)) for kind, group in itertools.groupby(noted) if kind == "pass"]
    assert len(passes) > 12
    assert set(passes) == {1}


@pytest.fixture
def heart(bench):
    """A job of which the launcher expects a sign of life every half a second."""
    job = bench.job("shards", hang_seconds=0.5)
    HEARTBEAT.open(heartbeats_of(job), 0)
    HEARTBEAT.started()
    HEARTBEAT.beat("training", steps=1)
    yield job
    vars(HEARTBEAT).update(vars(HeartbeatWriter()))  # closed


def test_a_loop_that_waits_for_a_slow_disk_does_not_hang(heart):
    [first] = read_heartbeats(heartbeats_of(heart))

    def write():
        beat = first.beat
        for _ in range(3):
            while (heartbeat := next(read_heartbeats(heartbeats_of(heart)))).beat == beat:
                time.sleep(0.01)
            beat = heartbeat.beat

    checkpointer._Writing(write).wait()


def test_a_disk_that_hangs_is_found_in_the_end(heart, monkeypatch):
    monkeypatch.setattr(checkpointer, "_SECONDS_FOR_A_DISK", 0.1)

    def write():
        watch = Watchdog(heart)
        while watch.find_hang() is None:
            time.sleep(0.1)

    checkpointer._Writing(write).wait()


# Pretraining on files of two runs.


def write_tokenizer(source, directory, some):
    """Write a tokenizer of some of another one's ordinary tokens; return its directory."""
    tokenizer = Tokenizer.load(source)
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos)][some]
    directory.mkdir()
    Tokenizer({token: i for i, token in enumerate(tokens)}).save(directory)
    return directory


def test_what_does_not_fit_is_named_before_training(bench, tmp_path, transcript):
    def refused(head, **inputs):
        job = bench.job("pretrain", inputs=inputs)
        transcript.refused(head, DataError, bench.run, job)
        assert not any(job.output.iterdir())
        assert not any(job.checkpoints.iterdir())

    fewer = write_tokenizer(bench.data["tokenizer"], tmp_path / "fewer", slice(400))
    refused("a tokenizer of fewer tokens", tokenizer=fewer)
    # The same tokens under other ids, which no shape would show.
    other = write_tokenizer(bench.data["tokenizer"], tmp_path / "other", slice(None, None, -1))
    refused("a tokenizer of the same tokens in reverse", tokenizer=other)
    inputs = {"tokenizer": fewer}
    for name in ("tokens", "rows"):
        inputs[name] = bench.done(name, name, inputs=inputs)[0].output
    refused("a tokenizer, tokens and rows that agree, of another size than the model's", **inputs)
    rows, _ = bench.done("rows", "short", section={"sequence_len": 64})
    refused("rows of another length than the model's", rows=rows.output)
