"""A stage on two hosts that share no disk: it trains, loses one, resumes, and ends as on one host.

The hosts are network namespaces; docs/verification/clusters.md has the last figures. By hand:

    .venv/bin/python -m pytest -q tests/campaigns/reliability/test_two_hosts.py
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.train.stage import LOST
from tests.support.flows.waiting import wait_until
from tests.support.reliability.two_hosts import (
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the same job makes with two ranks on one host."""
    return reference(tmp_path_factory.mktemp("whole"), STEPS)


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


def train_past_a_checkpoint(hosts: Hosts) -> int:
    """Start both; return the step of a checkpoint that both have passed."""
    a, b, look = hosts
    start(a, b)
    until(lambda: step_of(a) > SAVE_EVERY + 5 and look()["step"] >= SAVE_EVERY, a, b)
    return look()["step"]


def finish(hosts: Hosts, whole: dict[str, str], saved: int) -> None:
    """Both commands end well, with the files that one host makes, from what was saved."""
    a, b, look = hosts
    for host in (a, b):
        code = host.wait(SECONDS)
        assert code == 0, a.log.read_text() + b.log.read_text()
    found = look()
    assert found["files"] == whole
    *_, last = found["segments"]
    assert (last["nodes"], last["processes"]) == (2, 2)
    assert last["first_step"] >= saved


def test_a_host_that_is_lost_in_mid_run_changes_nothing_of_the_result(
    hosts: Hosts, whole: dict[str, str]
) -> None:
    a, b, look = hosts
    saved = train_past_a_checkpoint(hosts)
    b.kill()
    assert a.wait(SECONDS) == LOST
    said = a.log.read_text()
    assert said.splitlines()[-1].startswith("hint: "), said  # after the log of the rank that saw it
    assert len(look()["parts"]) >= 2  # of both hosts, and the job's records
    start(a, b)  # as the caller of the stage would
    finish(hosts, whole, saved)
    assert not look()["checkpoints"]


@pytest.mark.parametrize("is_another", [False, True], ids=["given again", "another machine"])
def test_node_0_that_is_lost_is_waited_for(
    hosts: Hosts, whole: dict[str, str], *, is_another: bool
) -> None:
    a, b, _ = hosts
    saved = train_past_a_checkpoint(hosts)
    a.kill()
    if is_another:
        a.replace()
    start(a)
    finish(hosts, whole, saved)
    assert b.runs == 1  # the same command has waited


def test_a_host_that_falls_silent_is_noticed_and_comes_back(
    hosts: Hosts, whole: dict[str, str]
) -> None:
    a, b, _ = hosts
    saved = train_past_a_checkpoint(hosts)
    b.plug("down")
    assert a.wait(SECONDS) == LOST
    assert "is silent for" in a.log.read_text()
    b.plug("up")
    start(a)
    finish(hosts, whole, saved)
    assert b.runs == 1


def test_a_stop_of_either_host_saves_on_both(hosts: Hosts, whole: dict[str, str]) -> None:
    a, b, look = hosts
    start(a, b)
    until(lambda: step_of(a) > 5, a, b)
    assert b.process is not None
    b.process.send_signal(signal.SIGTERM)
    assert b.wait(60) == 130, b.log.read_text()
    assert a.wait(60) == LOST
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
    saved = look()["step"]
    assert saved == step_of(a)
    start(a)
    finish(hosts, whole, saved)
