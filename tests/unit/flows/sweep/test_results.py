"""The results of a sweep: differences by pairs of seeds, who was stopped, table, page, numbers."""

import json
import re
from pathlib import Path
from typing import Any

from flows.identity.manifest import Manifest
from flows.sweep.files import SweepReport, write_files
from flows.sweep.grid import Sweep, open_sweep
from flows.sweep.request import SweepRequest
from flows.sweep.results import report_of_sweep, wanted_of
from tests.support.flows.shelf import make_manifest

# By point, val_bpb of the seeds 1, 2 and 3. The seeds differ far more than the points.
TABLE = {"base": (3.0, 2.0, 4.0), "p1": (2.9, 1.92, 3.89), "p2": (3.1, 2.1, 4.1)}


def sweep_of(**options: Any) -> Sweep:
    vary = ("optimizer.muon_lr=0.01,0.03",)
    return open_sweep(SweepRequest(vary=vary, seeds=(1, 2, 3), run_name="lr", **options))


def made(score: float, text: str = "text") -> Manifest:
    rows = make_manifest("rows", files={"rows": text})
    files = {"model": f"{score}"}
    return make_manifest("pretrain", files=files, inputs={"rows": rows}, metrics={"val_bpb": score})


def results(table: dict[str, tuple[float | None, ...]] | None = None) -> dict[str, Manifest | None]:
    return {
        f"{point} s{seed}": None if score is None else made(score)
        for point, scores in (table or TABLE).items()
        for seed, score in enumerate(scores, start=1)
    }


def report(table: dict[str, tuple[float | None, ...]] | None = None, **options: Any) -> SweepReport:
    return report_of_sweep(sweep_of(**options), results(table), "file:///store")


def test_the_table_has_differences_between_runs_of_the_same_seed() -> None:
    found = report(reduction=1)

    assert found.table.head == ("point", "muon_lr", "seeds", "mean val_bpb", "from base", "ended")
    assert found.table.rows == [
        ("base", "0.02", "3 of 3", "3.0000", "", ""),
        ("p1", "0.01", "3 of 3", "2.9033", "-0.0967 (-0.1346 to -0.0587)", ""),
        ("p2", "0.03", "3 of 3", "3.1000", "+0.1000 (+0.1000 to +0.1000)", ""),
    ]
    assert found.sentences == [
        "best: p1 (optimizer.muon_lr=0.01), val_bpb 2.9033, -0.0967 (-0.1346 to -0.0587) from base"
    ]


def test_a_point_that_is_stopped_keeps_the_seeds_it_had() -> None:
    found = report()

    assert found.table.rows[2] == (
        "p2",
        "0.03",
        "1 of 3",
        "3.1000",
        "+0.1000",
        "stopped after 1 seed",
    )
    assert (
        "p2 after 1 seed; after each seed the best 1 in 2 continue, so 7 of 9 runs"
        in found.sentences[1]
    )


def test_runs_that_are_not_wanted_decide_nothing() -> None:
    """Left in the store by a sweep with another reduction, they must not change the table."""
    without = {label: made for label, made in results().items() if label not in ("p2 s2", "p2 s3")}

    assert report_of_sweep(sweep_of(), without, "file:///store") == report()


def test_the_base_gets_all_seeds_and_the_points_what_is_allowed() -> None:
    sweep = sweep_of()
    base = {f"base s{seed}" for seed in (1, 2, 3)}

    assert wanted_of(sweep, {}) == base | {"p1 s1", "p2 s1"}
    known = {label: made for label, made in results().items() if label in ("p1 s1", "p2 s1")}
    assert wanted_of(sweep, known) == base | {"p1 s1", "p2 s1", "p1 s2"}


def test_a_failed_run_is_named_and_stops_its_point() -> None:
    found = report({**TABLE, "p1": (None, None, None)})

    assert found.table.rows[1] == ("p1", "0.01", "0 of 3", "", "", "failed")
    assert found.sentences[0] == "no point that has all seeds is better than base, by mean val_bpb"


def test_an_evaluation_without_the_score_counts_as_failed_and_says_why() -> None:
    reasons = {"gsm8k": 0.5, "humaneval_failed": "its examples are missing"}
    table = {"base": {"chatcore": 0.5}, "p1": reasons, "p2": {"chatcore": 0.6}}
    evaluated = {
        f"{point} s{seed}": make_manifest("chat_eval_sft", metrics=metrics)
        for point, metrics in table.items()
        for seed in (1, 2, 3)
    }
    sweep = sweep_of(stage="chat_eval_sft", reduction=1)

    assert "p1 s2" not in wanted_of(sweep, {"p1 s1": evaluated["p1 s1"]})
    found = report_of_sweep(sweep, evaluated, "file:///store")
    assert found.table.rows[1] == ("p1", "0.01", "0 of 3", "", "", "failed")
    assert found.sentences[0].startswith("best: p2")
    assert "p1 s1 has no chatcore (humaneval: its examples are missing)" in found.sentences


def test_without_a_base_there_are_no_differences() -> None:
    found = report({**TABLE, "base": (None, None, None)})

    assert [row[4] for row in found.table.rows] == ["", "", ""]
    assert found.sentences[0].startswith("base failed")
    assert not found.pictures


def test_a_difference_within_the_noise_is_no_finding() -> None:
    found = report({**TABLE, "p1": (2.9, 2.05, 3.99)})

    assert found.sentences[0].endswith("from base; its interval does not leave out 0")


def test_chatcore_is_better_if_it_is_more() -> None:
    table = {"base": 0.5, "p1": 0.4, "p2": 0.6}
    made_of = {
        f"{point} s{seed}": make_manifest("chat_eval_sft", metrics={"chatcore": score})
        for point, score in table.items()
        for seed in (1, 2, 3)
    }
    found = report_of_sweep(sweep_of(stage="chat_eval_sft"), made_of, "file:///store")

    assert found.sentences[0].startswith("best: p2")
    assert found.table.rows[1][-1] == "stopped after 1 seed"


def test_other_text_is_noted() -> None:
    sweep, found = sweep_of(reduction=1), results()
    found["p1 s1"] = made(2.9, text="other")

    sentences = report_of_sweep(sweep, found, "file:///store").sentences
    assert [each for each in sentences if each.startswith("note: ")] == [
        "note: p1 has other rows than base, maybe other text"
    ]


def test_the_page_holds_all_that_it_shows(tmp_path: Path) -> None:
    one = write_files(tmp_path, report())
    page, drawing = one.read_text(), one.with_suffix(".svg").read_text()
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert "stopped after 1 seed" in page
    assert all("base 0.02</text>" in each for each in (page, drawing))
    points = json.loads(one.with_suffix(".json").read_text())["points"]
    assert points[1]["scores"] == {"1": 2.9, "2": 1.92, "3": 3.89}
    assert points[2]["stopped"]
