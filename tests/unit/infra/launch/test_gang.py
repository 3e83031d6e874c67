"""Which machines build a stage together is read from the variables of whatever started them."""

import pytest

from infra.launch.rendezvous import Gang, find_gang
from nanochat_core.errors import ConfigError

SLURM = {
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login1",
    "SLURM_STEP_ID": "0",
}
JOBSET = {
    "NANOCHAT_NODES": "2",
    "JOB_COMPLETION_INDEX": "1",
    "NANOCHAT_ADDRESS": "nanochat-workers-0-0.nanochat",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
}
TORCHRUN = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "trainer-0.trainer"}


@pytest.mark.parametrize(
    ("environment", "gang"),
    [
        (SLURM, Gang(nodes=4, node=2, address="gpu03")),
        (JOBSET, Gang(nodes=2, node=1, address="nanochat-workers-0-0.nanochat")),
        (SKYPILOT, Gang(nodes=2, node=0, address="10.0.0.7")),
        (TORCHRUN, Gang(nodes=3, node=1, address="trainer-0.trainer")),
        (SLURM | TORCHRUN, Gang(nodes=3, node=1, address="trainer-0.trainer")),
        ({}, Gang(nodes=1, node=0, address=None)),
    ],
)
def test_a_gang_is_what_the_scheduler_started(environment: dict[str, str], gang: Gang) -> None:
    assert find_gang(environment=environment) == gang


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("rack[0-1]gpu[12,14-15].site,x", "rack0gpu12.site"),
        ("gpu[007-128]", "gpu007"),
    ],
)
def test_the_first_host_of_a_list_of_slurm_is_node_0(hosts: str, first: str) -> None:
    assert find_gang(environment=SLURM | {"SLURM_JOB_NODELIST": hosts}).address == first


def test_a_batch_script_is_alone_until_srun_starts_something() -> None:
    script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert find_gang(environment=script) == Gang(nodes=1, node=0, address=None)


def test_options_replace_what_the_scheduler_says_one_by_one() -> None:
    assert find_gang(node=0, environment=SLURM).nodes == 4
    assert find_gang(nodes=1, node=0, environment=SLURM).nodes == 1
    assert find_gang(address="10.1.1.1", environment=SLURM).address == "10.1.1.1"
    mine = SLURM | {"NANOCHAT_ADDRESS": "10.2.2.2"}
    assert find_gang(environment=mine).address == "10.2.2.2"
    assert find_gang(nodes=2, node=1, environment={}) == Gang(nodes=2, node=1, address=None)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN | {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4', not a number"),
        (SLURM | {"SLURM_NODEID": "4"}, "--node is 4, --nodes is 4 .Slurm's SLURM_NNODES"),
    ],
)
def test_numbers_that_cannot_be_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_gang(environment=environment)
