"""A grid of settings: its points, its runs, what they share, and what is refused."""

from typing import Any

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


def test_points_are_the_base_and_every_combination():
    sweep = grid(LR, STEPS)

    assert sweep.head == ("point", "muon_lr", "num_steps")
    assert [point.cells for point in sweep.points] == [
        ("base", "0.02", "50"),
        ("p1", "0.01", "10"),
        ("p2", "0.01", "20"),
        ("p3", "0.03", "10"),
        ("p4", "0.03", "20"),
    ]
    assert [member.label for member in sweep.members][:6] == [
        *("base s42", "p1 s42", "p2 s42", "p3 s42", "p4 s42", "base s43")
    ]


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


def test_a_point_that_changes_nothing_is_left_out():
    assert [p.cells[1] for p in grid("optimizer.muon_lr=0.020,0.03,0.030").points] == [
        "0.02",
        "0.03",
    ]


def test_values_with_commas_are_a_json_list():
    sweep = grid('base_eval.prompts=[["a,b"],["c"]]', stage="base_eval")

    assert [p.cells[1] for p in sweep.points[1:]] == ['["a,b"]', '["c"]']


def test_runs_of_one_seed_share_what_is_not_varied():
    labels = [unit.label for unit in units_of(grid(LR, seeds=(1, 2)))]

    assert labels[:2] == ["s1 / shards", "s2 / shards"]
    assert [label for label in labels if "pretrain" in label] == [
        f"{point} s{seed} / pretrain" for seed in (1, 2) for point in ("base", "p1", "p2")
    ]


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
