"""What a series found: points read from the store, laws through them, and what is said of it."""

import json

import pytest

from flows.artifacts.runs import Run
from flows.miniseries.findings import HEADER, Findings, analyse, rows, sentences, to_tree
from flows.miniseries.points import Missing, depths_in, read_point, runs_of
from flows.miniseries.scaling_law import fit_law
from flows.profiles import open_profile
from infra.storage.base import Store
from nanochat_core.scaling import num_params
from tests.support.flows.measured_series import SECONDS, put_evaluated
from tests.support.flows.shelf import put_run

BPB = {1: 3.0, 2: 2.6, 3: 2.4, 4: 2.3}


def find(store: Store, *depths: int, **options: object) -> Findings:
    found = runs_of(store, "tiny", depths or depths_in(store, "tiny"), **options)  # type: ignore[arg-type]
    return analyse(store, found, name="tiny", profile="tiny")


@pytest.fixture
def evaluated(store: Store) -> Store:
    """A store with four depths of tiny."""
    for depth, bpb in BPB.items():
        put_evaluated(
            store, depth, bpb, metrics={"val_bpb_low": bpb - 0.1, "val_bpb_high": bpb + 0.1}
        )
    return store


def test_points_are_what_the_manifests_say(evaluated: Store) -> None:
    findings = find(evaluated)

    assert [point.depth for point in findings.points] == [1, 2, 3, 4]
    assert findings.missing == ()
    point = findings.points[2]
    run = open_profile("tiny", depth=3).run
    assert point.size.parameters == num_params(run.model, run.numerics) == 753_792
    assert point.size.matrix_parameters + point.size.lm_head_parameters == (
        point.size.scaling_parameters
    )
    assert point.size.tokens == run.pretrain.num_steps * run.pretrain.total_batch_size
    assert point.seconds == SECONDS
    assert (point.val_bpb.low, point.val_bpb.value, point.val_bpb.high) == (2.3, 2.4, 2.5)
    assert point.core is None


def test_the_laws_go_through_flops_and_scaling_parameters(evaluated: Store) -> None:
    findings = find(evaluated)

    flops = [(point.size.flops, point.val_bpb.value) for point in findings.points]
    scaling = [(point.size.scaling_parameters, point.val_bpb.value) for point in findings.points]
    assert findings.by_flops == fit_law(flops)
    assert findings.by_parameters == fit_law(scaling)


def test_the_next_depth_is_as_far_as_the_last_one_and_an_extrapolation(evaluated: Store) -> None:
    after = find(evaluated, 1, 2, 4).next

    assert after is not None
    assert after.depth == 6
    assert after.prediction.beyond > 1
    said = [line for line in sentences(find(evaluated, 1, 2, 4)) if line.startswith("d6 would be")]
    assert "an extrapolation" in said[0]


def test_the_largest_is_reported_beside_what_the_smaller_ones_expect(evaluated: Store) -> None:
    check = find(evaluated).check

    assert check is not None
    assert (check.depth, check.measured) == (4, 2.3)
    expected = fit_law([(p.size.flops, p.val_bpb.value) for p in find(evaluated).points[:-1]])
    assert check.prediction == expected.predict(find(evaluated).points[-1].size.flops)


def test_a_depth_that_was_not_evaluated_is_missing_and_the_others_are_reported(
    evaluated: Store,
) -> None:
    put_evaluated(evaluated, 6, None)

    findings = find(evaluated, 1, 2, 5, 6)

    assert [point.depth for point in findings.points] == [1, 2]
    assert [missing.depth for missing in findings.missing] == [5, 6]
    assert findings.missing[0].why == "it was not evaluated"
    assert "has no val_bpb" in findings.missing[1].why
    assert "d5 is missing: it was not evaluated" in list(sentences(findings))


@pytest.mark.parametrize(
    ("status", "why"), [("failed", "it failed"), ("interrupted", "it was not evaluated")]
)
@pytest.mark.parametrize("stages", [{}, {"pretrain": "0" * 64}])
def test_a_run_that_did_not_come_to_scores_is_missing_for_that_reason(
    evaluated: Store, status: str, why: str, stages: dict[str, str]
) -> None:
    run = put_run(
        evaluated, "tiny-d5-20261121t070000z-abcd", name="tiny-d5", status=status, stages=stages
    )

    assert read_point(evaluated, run, 5) == Missing(depth=5, why=why)
    assert find(evaluated, 1, 5).missing == (Missing(depth=5, why=why),)


def test_three_models_say_no_range_and_their_scatter(evaluated: Store) -> None:
    said = next(line for line in sentences(find(evaluated, 1, 2, 3)) if line.startswith("by FLOPs"))

    assert "(scatter " in said
    assert "exponent" not in said


def test_an_artifact_that_is_gone_is_missing(evaluated: Store) -> None:
    run = runs_of(evaluated, "tiny", [2])[2]
    assert isinstance(run, Run)
    evaluated.delete(f"base_eval/{run.stages['base_eval']}/manifest.json")

    assert "is no longer in the store" in find(evaluated, 1, 2, 3).missing[0].why


def test_depths_with_other_settings_are_no_points_of_the_same_series(evaluated: Store) -> None:
    put_evaluated(evaluated, 5, 2.0, overrides=("seed=7",), started="2026-11-20T00:00:00Z")

    newest = runs_of(evaluated, "tiny", [1, 5])
    assert newest[5] == Missing(depth=5, why="it was trained with other settings only: seed=7")
    asked = runs_of(evaluated, "tiny", [1, 5], overrides=["seed=7"])
    assert isinstance(asked[5], Run)
    assert asked[1] == Missing(
        depth=1, why="it was trained with other settings only: the profile's own"
    )


def test_text_that_the_series_took_for_all_is_no_other_setting(store: Store) -> None:
    put_evaluated(store, 1, 3.0, overrides=("seed=7", "shards.num_shards=3"))

    assert isinstance(runs_of(store, "tiny", [1], overrides=["seed=7"])[1], Run)
    assert isinstance(runs_of(store, "tiny", [1], overrides=["shards.num_shards=3"])[1], Missing)


def test_points_on_other_text_are_distinguished(evaluated: Store) -> None:
    put_evaluated(evaluated, 5, 2.2, text="another")

    assert any("d5 was evaluated on other text than d1" in note for note in find(evaluated).notes)
    assert not any("other text" in note for note in find(evaluated, 1, 2).notes)


def test_tokens_that_do_not_grow_with_the_model_are_said(evaluated: Store) -> None:
    (note,) = find(evaluated).notes
    assert note.startswith("tokens per parameter go from 1.47 to ")


def test_names_of_other_series_are_not_taken_for_this_one(evaluated: Store) -> None:
    put_evaluated(evaluated, 7, 2.0, name="tiny-d1")
    put_evaluated(evaluated, 8, 2.0, name="other")

    assert depths_in(evaluated, "tiny") == [1, 2, 3, 4]


def test_the_same_store_gives_the_same_bytes(evaluated: Store) -> None:
    first, second = (json.dumps(to_tree(find(evaluated)), allow_nan=False) for _ in range(2))

    assert first == second
    tree = json.loads(first)
    assert tree["format"] == 1
    assert [point["depth"] for point in tree["points"]] == [1, 2, 3, 4]
    assert tree["val_bpb_by_flops"]["law"]["exponent"] > 0


def test_a_table_has_a_row_for_each_model(evaluated: Store) -> None:
    table = list(rows(find(evaluated)))

    assert [row[0] for row in table] == ["d1", "d2", "d3", "d4"]
    assert {len(row) for row in table} == {len(HEADER)}
    assert "2.6000 (2.5000 to 2.7000)" in table[1]


def test_one_model_is_a_table_and_no_law(evaluated: Store) -> None:
    findings = find(evaluated, 1)

    assert findings.by_flops.law is None
    assert findings.next is None
    assert any("no law" in line for line in sentences(findings))
