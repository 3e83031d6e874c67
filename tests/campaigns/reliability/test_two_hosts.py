"""A stage on two hosts that share no disk: it trains, loses one, resumes, and ends as on one host.

The hosts are network namespaces; docs/verification/clusters.md has the last figures. By hand:

    .venv/bin/python -m pytest -q -s tests/campaigns/reliability/test_two_hosts.py
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.train.stage import LOST
from infra.launch.torchrun import run_job
from tests.support.flows.waiting import wait_until
from tests.support.reliability.small_training import digests
from tests.support.reliability.two_hosts import (
    LARGE_VOCAB,
    SAVE_EVERY,
    Host,
    Hosts,
    reference,
    two_hosts,
    why_not,
    words,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or ""),
]
STEPS = 150
SECONDS = 240.0
GRACE = 120.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the same job makes with two ranks on one host."""
    job = reference(tmp_path_factory.mktemp("whole"), STEPS)
    run_job(job, processes=2, on_event=lambda event: None)
    return digests(job)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as found:
        yield found


def start(*hosts: Host) -> None:
    for host in hosts:
        host.start(words(num_steps=STEPS))


def until(is_true: Callable[[], Any], *hosts: Host) -> None:
    try:
        wait_until(is_true, seconds=SECONDS, every=0.1)
    except AssertionError as error:
        raise AssertionError("\n".join(host.log.read_text() for host in hosts)) from error


def step_of(host: Host) -> int:
    return max((e["step"] for e in host.events() if e["kind"] == "step"), default=0)


def train_past_a_checkpoint(a: Host, b: Host, look: Callable[[], dict[str, Any]]) -> None:
    start(a, b)
    until(lambda: step_of(a) > SAVE_EVERY + 5 and look()["step"] >= SAVE_EVERY, a, b)


def seconds_to_training(host: Host, since: float) -> float:
    """From a moment to the first step that was done after it by a job that had to start again."""
    started: list[float] = []

    def is_training() -> bool:
        starts = [e["time"] for e in host.events() if e["kind"] == "start" and e["time"] > since]
        steps = [e["time"] for e in host.events() if e["kind"] == "step"]
        started[:] = [step for step in steps if starts and step > starts[-1]]
        return bool(started)

    until(is_training, host)
    return started[0] - since


def finish(hosts: Hosts, whole: dict[str, str]) -> None:
    """Both commands end well, with the files that one host makes."""
    a, b, look = hosts
    for host in (a, b):
        code = host.wait(SECONDS)
        assert code == 0, a.log.read_text() + b.log.read_text()
    assert look()["files"] == whole


def test_a_host_that_is_lost_in_mid_run_changes_nothing_of_the_result(
    hosts: Hosts, whole: dict[str, str]
) -> None:
    a, b, look = hosts
    train_past_a_checkpoint(a, b, look)
    lost = time.time()
    b.kill()
    assert a.wait(SECONDS) == LOST
    noticed = time.time() - lost
    said = a.log.read_text()
    assert said.splitlines()[-1].startswith("hint: "), said  # after the log of the rank that saw it
    saved = look()
    assert len(saved["parts"]) >= 2, saved  # of both hosts, and the job's records
    start(a, b)  # as the caller of the stage would
    back = seconds_to_training(a, lost)
    finish(hosts, whole)
    found = look()
    assert not found["checkpoints"]
    first, second = found["segments"]
    assert (first["nodes"], second["nodes"], second["processes"]) == (2, 2, 2)
    assert second["first_step"] >= saved["step"] >= SAVE_EVERY
    print(f"noticed {noticed:.1f} s, training again {back:.1f} s after the loss")


@pytest.mark.parametrize("is_another", [False, True], ids=["given again", "another machine"])
def test_node_0_that_is_lost_is_waited_for(
    hosts: Hosts, whole: dict[str, str], *, is_another: bool
) -> None:
    a, b, look = hosts
    train_past_a_checkpoint(a, b, look)
    saved = look()["step"]
    lost = time.time()
    a.kill()
    if is_another:
        a.replace()
    start(a)
    back = seconds_to_training(a, lost)
    assert b.runs == 1  # the same command has waited
    assert [e["step"] for e in a.events() if e["kind"] == "start"][-1] >= saved
    finish(hosts, whole)
    print(f"training again {back:.1f} s after the loss of node 0")


def test_a_host_that_falls_silent_is_noticed_and_comes_back(
    hosts: Hosts, whole: dict[str, str]
) -> None:
    a, b, look = hosts
    train_past_a_checkpoint(a, b, look)
    lost = time.time()
    b.plug("down")
    assert a.wait(SECONDS) == LOST
    noticed = time.time() - lost
    assert "is silent for" in a.log.read_text()
    b.plug("up")
    start(a)
    back = seconds_to_training(a, lost)
    assert b.runs == 1
    finish(hosts, whole)
    print(f"noticed {noticed:.1f} s, training again {back:.1f} s after the cable was pulled")


def test_a_stop_of_either_host_saves_on_both(hosts: Hosts, whole: dict[str, str]) -> None:
    a, b, look = hosts
    start(a, b)
    until(lambda: step_of(a) > 5, a, b)
    assert b.process is not None
    b.process.send_signal(signal.SIGTERM)
    stopped_at = time.time()
    assert b.wait(60) == 130, b.log.read_text()
    assert a.wait(60) == LOST
    print(f"stopped in {time.time() - stopped_at:.1f} s")
    assert "was stopped" in a.log.read_text()
    stopped = step_of(a)
    saved = look()
    assert saved["step"] == stopped  # not only what was due
    assert any("/parts-" in key for key in saved["keys"])
    start(a, b)
    until(lambda: step_of(a) > stopped + 5, a, b)
    assert a.process is not None
    a.process.send_signal(signal.SIGTERM)
    assert a.wait(60) == 130, a.log.read_text()
    assert look()["step"] == step_of(a)
    start(a)
    finish(hosts, whole)


@pytest.mark.parametrize("slow", ["both", "node 0"])
def test_uploads_that_take_longer_than_the_time_between_saves_end_nothing(
    hosts: Hosts, whole: dict[str, str], slow: str
) -> None:
    a, b, look = hosts
    for host in (a, b) if slow == "both" else (a,):
        host.limit(1)
    for host in (a, b):
        host.start(words(num_steps=STEPS, save_every=3))
    steps: set[int] = set()
    while a.process is not None and a.process.poll() is None:
        steps.add(look().get("step", 0))
    finish(hosts, whole)
    assert len(steps) > 3, steps  # checkpoints have arrived all the time
    print(f"slow: {slow}; checkpoints seen in the store: {sorted(steps)}")


@pytest.mark.parametrize("during", ["training", "the upload of an earlier save"])
def test_a_stop_with_two_gigabytes_of_optimizer_state_saves_the_very_step(
    tmp_path: Path, during: str
) -> None:
    place = (f"grace_seconds={GRACE:.0f}", "save_every_seconds=100000")
    with two_hosts(tmp_path, LARGE_VOCAB) as (a, b, look):
        if during != "training":
            for host in (a, b):
                host.limit(25)  # together 50 MB/s to the store
        for host in (a, b):
            host.start(words(num_steps=STEPS, place=place, vocab=LARGE_VOCAB))
        if during == "training":  # the first step's save has arrived
            until(lambda: look().get("step", 0) >= 1, a, b)
            for host in (a, b):
                host.limit(25)
        else:
            until(lambda: step_of(a) >= 1, a, b)  # the first step's save is going up
        assert b.process is not None
        b.process.send_signal(signal.SIGTERM)
        stopped = time.time()
        assert b.wait(GRACE) == 130, b.log.read_text()
        seconds = time.time() - stopped
        assert a.wait(max(1.0, stopped + GRACE - time.time())) == LOST, a.log.read_text()
        saved = look()
        assert saved["step"] == step_of(a) > 1
        total = sum(saved["bytes"].values())  # two thirds of it are AdamW's moments
        assert total > 3e9, saved["bytes"]
        print(
            f"during {during}: {total / 1e9:.2f} GB, step {saved['step']}; node 1 ended in "
            f"{seconds:.1f} s, node 0 in {time.time() - stopped:.1f} s"
        )
