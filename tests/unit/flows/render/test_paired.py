"""Differences of two evaluations: of pairs where the same was asked, else of two scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.render import paired
from flows.render.paired import Delta, Score, delta_of
from nanochat_core.errors import ArtifactError
from nanochat_core.evaluate.intervals import Interval, paired_difference
from tests.support.flows.measured import parquet, reader

RIGHT = {"old": {"sums": 40, "words": 10}, "new": {"sums": 70, "words": 12}}  # of 100 and of 20
TOTALS = {"sums": 100, "words": 20}


def pair(*folders: Path) -> paired.Pairs:
    return paired.pair(*map(reader, folders))


def write(
    directory: Path, right: dict[str, int], nats: float = 0.0, num_bytes: int = 30, **scores: Any
) -> Path:
    directory.mkdir()
    examples = [
        {"task": task, "place": i, "answer": i, "correct": i < count}
        for task, count in right.items()
        for i in range(TOTALS[task])
    ]
    losses = [
        {"split": split, "place": i, "nats": 20 + 10 * (i % 5) + nats * (1 + i % 2), "bytes": size}
        for split in ("val", "train")
        for i, size in enumerate([num_bytes] * 10)
    ]
    (directory / "examples.parquet").write_bytes(parquet(examples))
    (directory / "losses.parquet").write_bytes(parquet(losses))
    tasks = {task: {"baseline": 0.25 if task == "words" else 0.0} for task in right}
    (directory / "scores.json").write_text(json.dumps({"tasks": tasks, "suite": "a"} | scores))
    return directory


def test_a_task_a_mean_and_bits_per_byte_have_differences_of_pairs(tmp_path):
    old, new = (
        write(tmp_path / name, RIGHT[name], nats=nats) for name, nats in (("old", 0), ("new", -1))
    )
    found = pair(old, new).differences
    sums, words = paired_difference(100, 40, 30, 0), paired_difference(20, 10, 2, 0)
    assert (found["sums"], found["words"]) == (sums, words)
    core = found["core"]
    assert core == found["chatcore"]
    assert core.value == pytest.approx(0.3 / 2 + 0.1 / 0.75 / 2)
    below = (0.5 * (sums.value - sums.low)) ** 2 + (0.5 / 0.75 * (words.value - words.low)) ** 2
    assert core.value - core.low == pytest.approx(below**0.5)
    # 15 nats fewer over 300 bytes; each row's change is known, though the rows differ by far more.
    assert found["val_bpb"].value == pytest.approx(-15 / 300 / 0.693147, rel=1e-5)
    assert -0.1 < found["val_bpb"].low < found["val_bpb"].high < -0.04


def test_other_questions_and_other_text_are_no_pairs(tmp_path):
    old = write(tmp_path / "old", RIGHT["old"])
    new = write(tmp_path / "new", RIGHT["new"], num_bytes=31, suite="b")
    found = pair(old, new)
    assert (found.differences, found.why_not) == ({}, "their suites are a and b")


def test_a_mean_with_another_task_in_it_is_no_pair(tmp_path):
    old = write(tmp_path / "old", {"sums": 40})
    new = write(tmp_path / "new", RIGHT["new"])
    assert pair(old, new).differences.keys() == {"sums", "val_bpb", "train_bpb"}
    unknown = write(tmp_path / "earlier", RIGHT["old"], tasks={"sums": {}, "words": {}})
    assert "core" not in pair(unknown, unknown).differences


def test_without_files_there_are_no_pairs_and_a_damaged_one_is_an_error(tmp_path):
    new = write(tmp_path / "new", RIGHT["new"])
    (tmp_path / "old").mkdir()
    assert not pair(tmp_path / "old", new).differences
    damaged = [("examples.parquet", "["), ("losses.parquet", "[")]
    for name, text in [*damaged, ("scores.json", "not_json"), ("scores.json", "[1]")]:
        (tmp_path / "old" / name).write_text(text)
        with pytest.raises(ArtifactError, match=f"{name} of old "):
            pair(tmp_path / "old", new)
        (tmp_path / "old" / name).unlink()


@pytest.mark.parametrize(
    ("name", "row", "missing"),
    [
        ("examples.parquet", {"task": "sums", "place": 0, "correct": True}, "answer"),
        ("examples.parquet", {"task": "sums", "answer": "3", "correct": True}, "place"),
        ("losses.parquet", {"split": "val", "nats": 20.0}, "bytes"),
    ],
)
def test_a_table_of_another_program_that_lacks_a_column_is_an_error(tmp_path, name, row, missing):
    old, new = (write(tmp_path / each, RIGHT["old"]) for each in ("old", "new"))
    (old / name).write_bytes(parquet([row]))
    with pytest.raises(ArtifactError, match=f"{name} of old has no column {missing}$") as caught:
        pair(old, new)
    assert caught.value.hint


def test_pairs_narrow_the_interval_of_a_difference():
    old, new = Score(value=0.4, low=0.3, high=0.5), Score(value=0.65, low=0.55, high=0.75)
    apart = delta_of(old, new, None)
    paired = delta_of(old, new, paired_difference(100, 40, 25, 0))
    assert apart.low is not None
    assert paired.low is not None
    assert paired.low > apart.low > 0
    other = Interval(value=0.01, low=0.0, high=0.02)  # of other questions than the scores
    assert delta_of(old, new, other) == apart
    assert delta_of(old, Score(value=0.5), None) == Delta(value=pytest.approx(0.1))


def test_a_difference_is_clear_if_its_interval_leaves_out_0():
    assert Delta(value=0.2, low=0.1, high=0.3).is_clear
    assert not Delta(value=0.2, low=-0.1, high=0.3).is_clear
    assert Delta(value=0.2, low=-0.1, high=0.3).text() == "+0.2 (-0.1 to +0.3)"
    assert Delta(value=-0.2, low=-0.3, high=-0.1).points == "-20.0 points (-30.0 to -10.0)"
    assert not Delta(value=0.2).is_clear
    assert Delta(value=0.2).points == "+20.0 points"
