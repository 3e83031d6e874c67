"""A job of several machines: which ranks run where, and by which address they meet."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.launch.rendezvous import Rendezvous, find_interface, own_address
from infra.launch.torchrun import JobFailed
from nanochat_core.job import Result
from tests.support.infra.launch.toy_jobs import ToyJobs
from tests.support.infra.ports import quiet_port

ENTRY = """
import json
import os


def run(job):
    rank = int(os.environ["RANK"])
    if rank == 3 and os.environ["TORCHELASTIC_RUN_ID"] == "broken":
        print("I am rank three")
        raise ValueError("no good")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    text = json.dumps([os.environ.get(name) for name in names])
    (job.directory / f"rank-{rank}").write_text(text)
    return {"size": int(os.environ["WORLD_SIZE"])}
"""

ALONE_ENTRY = """
import torch
from nanochat_core.runtime.hardware.distributed import open_world


def run(job):
    world = open_world(torch.device("cpu"))
    return {f"rank_{number}": number for number in world.gather(world.rank)}
"""

KILLED_ENTRY = """
import os
import signal


def run(job):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as before the worker has its handler
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.torch
def test_two_machines_of_two_ranks_are_one_world_and_node_0_has_the_result(
    jobs: ToyJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    nodes = [jobs.make(ENTRY, name=name) for name in ("a", "b")]

    def run(node: int, endpoint: str, name: str) -> object:
        rendezvous = Rendezvous(nodes=2, node=node, endpoint=endpoint, id=name)
        try:
            return jobs.run(nodes[node], 2, rendezvous=rendezvous, stop=stops[node])
        except JobFailed as error:
            stops[1 - node].set()  # as the nodes do for each other
            return error

    for name in ("good", "broken"):
        stops = [threading.Event() for _ in nodes]
        endpoint = f"127.0.0.1:{quiet_port()}"
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda node: run(node, endpoint, name), (0, 1)))  # noqa: B023
        if name == "good":
            first, second = results
            assert first.metrics == {"size": 4}  # pyright: ignore[reportAttributeAccessIssue]
            assert second.metrics == {}  # pyright: ignore[reportAttributeAccessIssue]
    for node, rank, local in ((0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1)):
        text = (nodes[node].directory / f"rank-{rank}").read_text()
        assert text == f'["{rank}", "{local}", "4", "127.0.0.1", "lo"]'
    failed = results[1]
    assert isinstance(failed, JobFailed)
    assert str(failed) == "toy failed on rank 3: ValueError: no good"
    assert "ValueError: no good" in failed.log_tail  # of that rank's own log


@pytest.mark.torch
def test_the_only_ranks_of_two_machines_meet_without_torchrun(
    jobs: ToyJobs,
) -> None:
    endpoint = f"127.0.0.1:{quiet_port()}"

    def run(node: int) -> Result:
        rendezvous = Rendezvous(nodes=2, node=node, endpoint=endpoint, id="x")
        return jobs.run(jobs.make(ALONE_ENTRY, name=str(node)), rendezvous=rendezvous)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    assert first.metrics == {"rank_0": 0, "rank_1": 1}
    assert second.metrics == {}


def test_a_signal_from_elsewhere_is_the_loss_of_a_machines_only_rank(
    jobs: ToyJobs,
) -> None:
    rendezvous = Rendezvous(nodes=2, node=1, endpoint="127.0.0.1:1", id="x")
    with pytest.raises(JobFailed, match="killed by SIGTERM"):
        jobs.run(jobs.make(KILLED_ENTRY), rendezvous=rendezvous)


def test_a_given_address_and_interface_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = Rendezvous(nodes=2, node=1, endpoint="127.0.0.1:1234", id="x")
    assert rendezvous.environment() == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    assert rendezvous.environment() == {}  # a user's own setting stays
    monkeypatch.setenv("PET_MASTER_ADDR", "gpu-7.cluster")
    assert own_address() == "gpu-7.cluster"


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.77") is None
    assert find_interface("no such host") is None


def test_an_address_of_this_machine_is_found_without_a_way_out() -> None:
    assert find_interface(own_address())
    for host in ("127.0.0.1", "no such host"):  # of node 0
        rendezvous = Rendezvous(nodes=2, node=1, endpoint=f"{host}:1234", id="x")
        assert rendezvous.environment()
