"""The results of a sweep: differences by pairs of seeds, points that were stopped, its page."""

import json

from flows.sweep.grid import open_sweep
from flows.sweep.request import SweepRequest
from flows.sweep.results import report_of_sweep, wanted_of, write_files
from tests.support.flows.shelf import make_manifest

# By point, val_bpb of the seeds 1, 2 and 3. The seeds differ far more than the points.
TABLE = {"base": (3.0, 2.0, 4.0), "p1": (2.9, 1.92, 3.89), "p2": (3.1, 2.1, 4.1)}


def sweep_of(**options):
    vary = ("optimizer.muon_lr=0.01,0.03",)
    return open_sweep(SweepRequest(vary=vary, seeds=(1, 2, 3), run_name="lr", **options))


def made(score, text="text"):
    rows = make_manifest("rows", files={"rows": text})
    files = {"model": f"{score}"}
    return make_manifest("pretrain", files=files, inputs={"rows": rows}, metrics={"val_bpb": score})


def results(**changed):
    return {
        f"{point} s{seed}": None if score is None else made(score)
        for point, scores in {**TABLE, **changed}.items()
        for seed, score in enumerate(scores, start=1)
    }


def report(*, reduction=2, **changed):
    return report_of_sweep(sweep_of(reduction=reduction), results(**changed), "file:///store")


def evaluated(**metrics):
    """Return evaluations of a chat model for each seed, by point."""
    return {
        f"{point} s{seed}": make_manifest("chat_eval_sft", metrics=found)
        for point, found in metrics.items()
        for seed in (1, 2, 3)
    }


def test_the_table_has_differences_between_runs_of_the_same_seed(shows):
    shows(report(reduction=1))


def test_a_point_that_is_stopped_keeps_the_seeds_it_had(shows):
    found = shows(report())
    assert found == report_of_sweep(sweep_of(), results(), "file:///store")
    # Runs that are not wanted decide nothing, such as those of a sweep with another reduction.
    without = {label: made for label, made in results().items() if label not in ("p2 s2", "p2 s3")}
    assert report_of_sweep(sweep_of(), without, "file:///store") == found


def test_the_base_gets_all_seeds_and_the_points_what_is_allowed():
    sweep = sweep_of()
    base = {f"base s{seed}" for seed in (1, 2, 3)}
    assert wanted_of(sweep, {}) == base | {"p1 s1", "p2 s1"}
    known = {label: made for label, made in results().items() if label in ("p1 s1", "p2 s1")}
    assert wanted_of(sweep, known) == base | {"p1 s1", "p2 s1", "p1 s2"}


def test_a_failed_run_is_named_and_stops_its_point(shows):
    shows(report(p1=(None, None, None)))
    found = shows(report(base=(None, None, None)))
    assert not found.pictures
    assert [point["failed"] for point in found.tree["points"]] == [True, False, False]


def test_an_evaluation_without_the_score_counts_as_failed_and_names_its_reason(shows):
    reasons = {"gsm8k": 0.5, "humaneval_failed": "its examples are missing"}
    found = evaluated(base={"chatcore": 0.5}, p1=reasons, p2={"chatcore": 0.6})
    sweep = sweep_of(stage="chat_eval_sft", reduction=1)
    assert "p1 s2" not in wanted_of(sweep, {"p1 s1": found["p1 s1"]})
    shows(report_of_sweep(sweep, found, "file:///store"))


def test_a_difference_within_the_noise_is_no_finding(shows):
    shows(report(p1=(2.9, 2.05, 3.99)))


def test_chatcore_is_better_if_it_is_more(shows):
    found = evaluated(base={"chatcore": 0.5}, p1={"chatcore": 0.4}, p2={"chatcore": 0.6})
    shows(report_of_sweep(sweep_of(stage="chat_eval_sft"), found, "file:///store"))


def test_other_text_is_noted(shows):
    found = results() | {"p1 s1": made(2.9, text="other")}
    shows(report_of_sweep(sweep_of(reduction=1), found, "file:///store"))


def test_the_page_holds_all_that_it_shows(tmp_path):
    one = write_files(tmp_path, report())
    page = one.read_text()
    assert "stopped after 1 seed" in page
    assert "base 0.02</text>" in page
    points = json.loads(one.with_suffix(".json").read_text())["points"]
    assert points[1]["scores"] == {"1": 2.9, "2": 1.92, "3": 3.89}
    assert points[2]["stopped"]
