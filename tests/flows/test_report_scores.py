"""Scores on the report card: their intervals, and tasks that could not be judged."""

import json

from tests.flows.test_report import make_inputs, make_report, run_report


def test_scores_come_with_their_intervals(tmp_path):
    page, text = make_report(tmp_path)
    for form in (" ".join(page.split()), text):
        assert "core 0.2000 (0.1500 to 0.2500), val_bpb 1.6000 (1.5500 to 1.6500)" in form
        assert "0.210 (0.105 to 0.420)" in form
        assert "Could not be judged" not in form


def test_a_task_that_could_not_be_judged_is_told(tmp_path):
    inputs = make_inputs(tmp_path / "store")
    path = inputs["chat_eval_rl"] / "scores.json"
    scores = json.loads(path.read_text())
    scores |= {"chatcore": None, "failed": {"humaneval": "no <sandbox> here"}, "intervals": {}}
    path.write_text(json.dumps(scores))
    page, text = run_report(tmp_path / "job", inputs)
    assert "Could not be judged: RL, humaneval: no &lt;sandbox&gt; here." in page
    assert "RL, humaneval: no <sandbox> here" in text
    assert "not known after RL" in text
    assert "not known" in page
