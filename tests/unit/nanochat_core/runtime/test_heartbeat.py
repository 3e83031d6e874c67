"""Heartbeats: what the launcher reads is what the rank noted last."""

import os
import time

from nanochat_core.runtime.heartbeat import (
    STARTING_TIMES,
    HeartbeatWriter,
    forget_heartbeats,
    read_heartbeats,
)


def test_the_launcher_reads_what_the_rank_noted_last(tmp_path):
    hearts = [HeartbeatWriter(), HeartbeatWriter()]
    before = time.monotonic()
    for rank, heart in enumerate(hearts):
        heart.open(tmp_path / "ranks", rank)
    assert [heartbeat.doing for heartbeat in read_heartbeats(tmp_path / "ranks")] == [
        "starting"
    ] * 2
    hearts[1].beat("gradients")
    hearts[1].beat("saving", steps=1)
    hearts[0].beat("a name that is longer than the place there is for it, by far")
    first, second = read_heartbeats(tmp_path / "ranks")
    assert (first.rank, second.rank) == (0, 1)
    assert (second.doing, second.steps, second.pid) == ("saving", 1, os.getpid())
    assert first.doing == "a name that is longer than the place the"
    assert before <= second.beat <= first.beat <= time.monotonic()


def test_longer_silence_is_allowed_at_the_start_and_where_it_is_declared(tmp_path):
    heart = HeartbeatWriter()
    heart.open(tmp_path, 0)

    def times():
        [heartbeat] = read_heartbeats(tmp_path)
        return heartbeat.times

    assert times() == STARTING_TIMES
    heart.beat("loading the model")
    assert times() == STARTING_TIMES
    heart.started()
    assert times() == 1
    with heart.busy("compiling", times=3):
        heart.beat("gradients")
        with heart.busy("writing", times=2):
            assert times() == 3
        assert times() == 3
    assert times() == 1


def test_another_process_of_the_rank_beats_for_it(tmp_path):
    heart, helper = HeartbeatWriter(), HeartbeatWriter()
    heart.open(tmp_path, 0)
    heart.started()
    heart.beat("waiting for files", steps=2)
    [before] = read_heartbeats(tmp_path)
    helper.join(heart.path)

    helper.beat("reading documents", steps=5)

    [after] = read_heartbeats(tmp_path)
    assert after.beat > before.beat
    assert (after.doing, after.steps, after.pid) == ("waiting for files", 2, os.getpid())


def test_a_heart_that_is_not_open_writes_nothing(tmp_path):
    heart = HeartbeatWriter()
    heart.started()
    heart.beat("unheard")
    with heart.busy("unheard", times=2):
        assert heart.path is None
    heart.open(tmp_path, 3)
    assert [heartbeat.rank for heartbeat in read_heartbeats(tmp_path)] == [3]
    forget_heartbeats(tmp_path)
    assert list(tmp_path.iterdir()) == []
