"""A grid of settings: its points, its runs, what they share, and what is refused."""

from typing import Any

import pytest

from flows.plan.pinned import sections_of
from flows.plan.upstream import moving_names
from flows.profiles import open_profile
from flows.sweep.grid import Sweep, open_sweep
from flows.sweep.plan import units_of
from flows.sweep.request import SweepRequest
from nanochat_core.errors import ConfigError

LR = "optimizer.muon_lr=0.01,0.03"
STEPS = "pretrain.num_steps=10,20"


def grid(*vary: str, **options: Any) -> Sweep:
    return open_sweep(SweepRequest(vary=vary, **options))


@pytest.mark.parametrize(
    ("vary", "options"),
    [
        ((LR, STEPS), {}),  # the base and every combination
        (("optimizer.muon_lr=0.020,0.03,0.030",), {}),  # what changes nothing is left out
        (('base_eval.prompts=[["a,b"],["c"]]',), {"stage": "base_eval"}),  # values with commas
        (("model.depth=1,2",), {"stage": "base_eval", "seeds": (42,)}),  # a series
        (("model.depth=1,2", "pretrain.num_steps=10,50"), {}),
    ],
    ids=["grid", "same", "commas", "series", "depths"],
)
def test_points_runs_and_what_runs_of_a_seed_share(vary, options, transcript):
    sweep = grid(*vary, **{"seeds": (1, 2), "run_name": "mine", **options})
    points = [", ".join(each) for each in (sweep.head, *(point.cells for point in sweep.points))]
    runs = [f"{m.label}: {m.request.run_name}, depth {m.depth}" for m in sweep.members]
    units = [unit.label for unit in units_of(sweep)]
    for head, lines in (("points", points), ("runs", runs), ("units", units)):
        transcript.check(head, "\n".join(lines))


def test_a_member_is_what_its_overrides_say():
    sweep = grid(LR, overrides=("pretrain.num_steps=7",), depth=2, seeds=(1,), run_name="mine")

    member = sweep.members[2]
    run = member.request
    assert (run.run_name, run.until) == ("mine-p2-s1", "pretrain")
    assert run.overrides == ("pretrain.num_steps=7", "optimizer.muon_lr=0.03", "seed=1")
    assert member.profile == open_profile("tiny", depth=2, overrides=run.overrides)


def test_a_sweep_asks_upstream_for_no_more_than_its_stages_read():
    """Pretraining on one's own text needs no network for the datasets of chat."""
    run = grid(LR, profile="d12").largest.profile.run
    before, after = (sections_of({}, until=stage) for stage in ("pretrain", "chat_eval_sft"))

    text = "karpathy/climbmix-400b-shuffle@main"
    assert moving_names(run, before) == (text,)
    assert set(moving_names(run, after)) > {text}


def test_the_same_grid_has_the_same_name_and_another_one_another():
    name = grid(LR).name

    assert name.startswith("tiny-sweep-")
    assert grid(LR).name == name
    assert grid(LR, reduction=3).name != name
    assert grid(LR, overrides=("pretrain.num_steps=7",)).name != name


def test_a_request_without_seeds_or_that_stops_every_point_is_refused(transcript):
    for options in ({"seeds": ()}, {"reduction": 0}):
        request = SweepRequest(vary=(LR,), **options)
        transcript.refused(str(options), ConfigError, open_sweep, request)
