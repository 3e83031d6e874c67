"""Which machines build a stage together is read from torchrun's own variables."""

import pytest

from infra.launch.rendezvous import Gang, assignments, find_gang
from nanochat_core.errors import ConfigError

TORCHRUN = {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "trainer-0.trainer"}
SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "gang"),
    [
        (TORCHRUN, Gang(nodes=3, node=1)),
        (SLURM, Gang(nodes=1, node=0)),  # infra/slurm/stage.sbatch sets torchrun's variables
        ({}, Gang(nodes=1, node=0)),
    ],
)
def test_a_gang_is_what_was_started_together(environment: dict[str, str], gang: Gang) -> None:
    assert find_gang(environment) == gang


def test_a_command_that_is_given_again_has_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert assignments() == ""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert assignments() == "PET_NNODES=2 PET_NODE_RANK=1 "


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4, PET_NODE_RANK is 1"),
        ({"PET_NODE_RANK": "3"}, "PET_NNODES is 3, PET_NODE_RANK is 3"),
        ({"PET_NODE_RANK": ""}, "PET_NNODES is 3, PET_NODE_RANK is not set"),
        ({"PET_NNODES": ""}, "PET_NNODES is not set, PET_NODE_RANK is 1"),
        ({"PET_NNODES": "0", "PET_NODE_RANK": "0"}, "PET_NNODES is 0, PET_NODE_RANK is 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_gang(TORCHRUN | changed)
