"""A series: its depths, what they share, and what is refused."""

import pytest

from flows.miniseries.series import open_series
from flows.overrides import default_name
from flows.profiles import open_profile
from flows.sweep.members import units_of
from nanochat_core.errors import ConfigError


def test_what_depth_does_not_decide_is_built_once() -> None:
    units = units_of(open_series("tiny", [3, 1, 2]))

    assert [unit.label for unit in units] == [
        *("shards", "task_data", "tokenizer", "tokens", "rows"),
        *(f"d{depth} / {stage}" for stage in ("pretrain", "base_eval") for depth in (1, 2, 3)),
    ]
    evaluated = units[-1]
    assert [source.label for source in evaluated.inputs] == ["d3 / pretrain", "rows", "task_data"]


def test_all_depths_get_the_text_of_the_one_that_needs_most() -> None:
    series = open_series("d12", [4, 12], overrides=["seed=7"])

    most = open_profile("d12").run.shards.num_shards
    assert open_profile("d12", depth=4).run.shards.num_shards < most
    assert {member.profile.run.shards.num_shards for member in series.members} == {most}
    assert units_of(series)[0].label == "shards"
    for member in series.members:  # a run's record gives the very same settings again
        again = open_profile("d12", depth=member.depth, overrides=member.overrides)
        assert again == member.profile
        assert member.overrides == ("seed=7", f"shards.num_shards={most}")


def test_text_that_a_person_asked_for_is_left_alone() -> None:
    series = open_series("d12", [4, 12], overrides=["shards.num_shards=3"])

    assert series.members[1].overrides == ("shards.num_shards=3",)
    assert series.members[1].profile.run.shards.num_shards == 3


def test_runs_are_called_after_series_and_depth() -> None:
    series = open_series("tiny", [2, 1], name="mine")

    assert [(m.name, m.depth, m.label) for m in series.members] == [
        ("mine-d1", 1, "d1"),
        ("mine-d2", 2, "d2"),
    ]


def test_a_series_with_other_settings_takes_no_name_of_the_profiles_own() -> None:
    own = default_name("tiny", overrides=("seed=7",))
    series = open_series("tiny", [2, 1], overrides=["seed=7"])
    assert [member.name for member in series.members] == [f"{own}-d1", f"{own}-d2"]
    # A run of that depth and these settings has the same name.
    assert default_name("tiny", depth=2, overrides=("seed=7",)) == f"{own}-d2"
    assert open_series("tiny", [2, 1], overrides=["seed=42"]).name == "tiny"


@pytest.mark.parametrize(
    ("depths", "said"),
    [
        ([2, 3, 2], "depth 2 is given twice"),
        ([4], "1 depth, expected 2 to 12"),
        ([], "0 depths, expected 2 to 12"),
        (range(1, 14), "13 depths, expected 2 to 12"),
        ([0, 2], "depth 0 is not between 1 and 100"),
        ([2, 101], "depth 101 is not between 1 and 100"),
    ],
)
def test_depths_that_are_no_series_are_refused(depths: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_series("tiny", list(depths))


def test_a_name_that_no_run_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        open_series("tiny", [1, 2], name="a/b")
