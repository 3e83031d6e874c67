"""Verdicts on answers are nanochat's; conversations: test_task_download of nanochat_core."""

import pytest

from tasks import registry
from tests.support.tasks.peer import parquet_of, run_peer
from tests.support.tasks.rows import ROWS, rows_of

NUMBERS = ("72", "-3", "1,234,567", "1234567", "0.5", ".5", "12.", "12", "7,000", "7000.", "-", "x")
ANSWERS = {
    "gsm8k": (
        *(f"#### {number}" for number in NUMBERS),
        *(f"so <<1+1=2>>2\n#### {number} apples" for number in NUMBERS),
        *("", "####72", "72", "### 72", "#### 72\n#### 12", "####  72"),
    )
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_verdicts_are_nanochats(name, tmp_path):
    split = {"mmlu": "auxiliary_train", "humaneval": "test"}.get(name, "train")
    rows = rows_of(name, 200, seed=1)
    answers = ANSWERS.get(name, ())
    theirs, verdicts = run_peer(name, [parquet_of(rows)], tmp_path, split=split, answers=answers)
    tried = [answers or c.get("letters", ()) for c in theirs]
    graded = [
        [registry.grader_of(name).is_correct(c, a) for a in tried[i]] for i, c in enumerate(theirs)
    ]
    assert graded == verdicts
    if name not in ("smoltalk", "humaneval"):  # one has no grading, the other tests of its own
        assert {v for line in verdicts for v in line} == {True, False}
