"""What a job sees of the placement."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flows.building.job import resources_of
from flows.profiles import open_profile
from flows.stages import BASE_EVAL, PRETRAIN, SFT
from tests.support.small_job import one_thread


@pytest.mark.parametrize(
    ("stage", "profile", "gpus", "nodes", "chosen"),
    [
        (PRETRAIN, "speedrun", 8, 1, True),
        (PRETRAIN, "d12", 1, 1, True),
        (PRETRAIN, "d12", 8, 4, "blocks"),
        (PRETRAIN, "tiny", 1, 1, "blocks"),
        (SFT, "speedrun", 1, 1, "blocks"),
        (BASE_EVAL, "speedrun", 1, 1, "blocks"),
    ],
)
def test_passes_are_compiled_whole_where_pretraining_is_long(stage, profile, gpus, nodes, chosen):
    resources = one_thread(compile="auto")
    placement = SimpleNamespace(resources=resources, gpus=gpus, nodes=nodes)
    run = open_profile(profile, snapshots=False).run
    context: Any = SimpleNamespace(run=run, placement=placement)
    assert resources_of(stage, context) == replace(resources, compile=chosen)
    for given in (True, False, "blocks"):
        placement.resources = replace(resources, compile=given)
        assert resources_of(stage, context) is placement.resources
