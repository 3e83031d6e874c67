"""Signs of life: what the launcher reads is what the rank said last."""

import os
import time
from pathlib import Path

from nanochat_core.runtime.heartbeat import Heart, forget_pulses, read_pulses


def test_the_launcher_reads_what_the_rank_said_last(tmp_path: Path) -> None:
    hearts = [Heart(), Heart()]
    for rank, heart in enumerate(hearts):
        heart.open(tmp_path / "ranks", rank)
    assert list(read_pulses(tmp_path / "ranks")) == []  # nobody promised to beat
    for heart in hearts:
        heart.beat("evaluating")
    assert list(read_pulses(tmp_path / "ranks")) == []
    before = time.monotonic()
    for heart in hearts:
        heart.watch()
    assert [pulse.doing for pulse in read_pulses(tmp_path / "ranks")] == ["beginning"] * 2
    hearts[1].beat("gradients")
    hearts[1].beat("saving", steps=1)
    hearts[0].beat("a name that is longer than the place there is for it, by far")
    first, second = read_pulses(tmp_path / "ranks")
    assert (first.rank, second.rank) == (0, 1)
    assert (second.doing, second.steps, second.pid) == ("saving", 1, os.getpid())
    assert first.doing == "a name that is longer than the place the"
    assert before <= second.beat <= first.beat <= time.monotonic()


def test_a_rank_at_rest_is_not_watched_and_an_unopened_heart_is_silent(tmp_path: Path) -> None:
    heart = Heart()
    heart.watch()
    heart.beat("unheard")
    heart.open(tmp_path, 3)
    heart.beat("evaluating")
    heart.rest()
    heart.beat("evaluating")
    assert list(read_pulses(tmp_path)) == []
    heart.watch()
    heart.beat("once more", steps=2)
    assert [(pulse.rank, pulse.steps) for pulse in read_pulses(tmp_path)] == [(3, 2)]
    forget_pulses(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_beat_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    heart = Heart()
    heart.open(tmp_path, 0)
    heart.watch()
    began = time.perf_counter()
    for _ in range(1000):
        heart.beat("gradients", steps=1)
    assert time.perf_counter() - began < 0.1
