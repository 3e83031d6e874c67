"""Scores on the report card: their intervals, and tasks that could not be judged."""

import json
import re

from tests.support.flows.reported import make_inputs, plain, run_report


def test_scores_come_with_their_intervals(card):
    _, text = card
    assert "core 0.2000 (0.1500 to 0.2500), val_bpb 1.6000 (1.5500 to 1.6500)" in text
    assert "| 0.210 (0.105 to 0.420); +0.110 (" in text
    assert "Could not be evaluated" not in text


def test_a_task_that_could_not_be_evaluated_is_reported(tmp_path):
    inputs = make_inputs(tmp_path / "store")
    path = inputs["chat_eval_rl"] / "scores.json"
    scores = json.loads(path.read_text())
    scores |= {"chatcore": None, "failed": {"humaneval": "no <sandbox> here"}, "intervals": {}}
    path.write_text(json.dumps(scores))
    page, text = run_report(tmp_path / "job", inputs)
    assert "Could not be evaluated:\nRL, humaneval: no &lt;sandbox&gt; here</pre>" in page
    assert "Could not be evaluated:\nRL, humaneval: no <sandbox> here\n```" in text
    assert re.search(
        r"\n- ChatCORE: 0.* after midtraining, 0.* after SFT, not known after RL\n", text
    )
    assert "not known" in page


def test_the_card_says_which_tasks_are_english_and_what_training_asks_too(card, tmp_path):
    _, text = card
    assert "In English: arithmetic, spelling. Questions that training has too: none." in text
    inputs = make_inputs(tmp_path / "store")
    for name in ("midtrain", "sft", "rl"):
        path = inputs[f"chat_eval_{name}"] / "scores.json"
        scores = json.loads(path.read_text())
        scores["tasks"]["letters"] = scores["tasks"]["spelling"]
        path.write_text(json.dumps(scores))
    path = inputs["task_data"] / "task_data.json"
    path.write_text(
        path.read_text().replace('"test": 100, "overlap": 0', '"test": 100, "overlap": 7')
    )
    _, text = run_report(tmp_path / "job", inputs)
    assert (
        "In English: arithmetic, spelling. From a file of the user's own, in its language: "
        "letters. Questions that training has too: 7 of 100 of letters, 7 of 100 of spelling."
    ) in text


def test_core_stands_task_by_task_beside_gpt2(card):
    page, text = card
    assert "0.2000 (0.1500 to 0.2500) GPT-2 0.2565" in plain(page)
    assert 'u style="left:25.65%"' in page
    assert "\n0.2000 (0.1500 to 0.2500); GPT-2 0.2565\n" in text
    assert "| boolq | 20.0 % (15.0 to 25.0 %, 20 of 100) | -0.600 |" in text


def test_a_score_below_guessing_stays_on_its_bar(card):
    page, _ = card
    places = [float(share) for share in re.findall(r"left:([-\d.]+)%", page)]
    assert min(places) == 0.0
    assert max(places) <= 100.0


def test_a_base_model_that_was_not_asked_has_no_core(tmp_path):
    inputs = make_inputs(tmp_path / "store")
    path = inputs["base_eval"] / "scores.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"core": None, "tasks": {}}))
    page, text = run_report(tmp_path / "job", inputs)
    assert "GPT-2 0.2565" not in page
    assert "CORE\n" not in text.replace("ChatCORE", "")


def test_each_stage_has_its_price(card):
    _, text = card
    assert re.search(
        r"\| pretrain \| a base model \| 1 \| \d+ bytes \| 1 min 6 s \| \$0.25 \|", text
    )
    assert text.count("| $0.25 |") == 13


def test_the_machine_is_reported_as_the_stage_calls_it(card):
    _, text = card
    for line in ("device: NVIDIA H100 80GB HBM3", "compile: no", "peak memory: 61.25 GB"):
        assert f"- {line}\n" in text


def test_a_task_of_core_that_could_not_be_evaluated_is_reported(tmp_path):
    inputs = make_inputs(tmp_path / "store")
    path = inputs["base_eval"] / "scores.json"
    changes = {"core": None, "failed": {"boolq": "boolq.jsonl line 3 is no example"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    page, text = run_report(tmp_path / "job", inputs)
    assert "Could not be evaluated:\npretraining, boolq: boolq.jsonl line 3 is no example\n" in text
    assert "Not known: a task could not be evaluated GPT-2 0.2565 " in plain(page)
    assert "\nNot known: a task could not be evaluated; GPT-2 0.2565\n" in text
    assert "| hellaswag |" in text
