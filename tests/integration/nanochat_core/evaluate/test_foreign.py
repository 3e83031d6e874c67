"""A model of transformers answers lettered choices; a small random GPT-2 stands for all.

That its answers to CORE are a straight reading's and nanochat's: tests/integration/bench. What it
leaves of them: tests/integration/flows/evals.
"""

import importlib.util
import json
import random

import pyarrow.parquet as pq
import pytest
import torch

from nanochat_core.config import ChatEvalConfig, EvalTaskConfig
from nanochat_core.errors import DataError, ModelError
from nanochat_core.evaluate import foreign
from nanochat_core.evaluate.foreign import open_foreign
from nanochat_core.job import write_json
from tasks.kinds import multiple_choice
from tests.support.nanochat_core.evaluate.gpt2 import BOS, write_gpt2
from tests.support.small_job import small_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not importlib.util.find_spec("transformers"), reason="transformers is not installed"
    ),
]
WINDOW = 512
CPU = torch.device("cpu")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TEMPLATES = (None, TEMPLATE)


@pytest.fixture(scope="module", params=TEMPLATES, ids=["plain", "template"])
def weights(request, tmp_path_factory):
    return write_gpt2(tmp_path_factory.mktemp("gpt2"), window=WINDOW, template=request.param)


def question(number, letters="ABCD"):
    choices = [f"{number * i} things" for i in range(len(letters))]
    return multiple_choice.make_conversation(
        f"What is {number}?", list(letters), choices, letters[number % len(letters)]
    )


@pytest.fixture
def make(weights, tmp_path):
    """make(questions): the job of one evaluation of chats."""

    def make(questions):
        data = tmp_path / "data"
        (data / "arc_easy").mkdir(parents=True)
        lines = [json.dumps(question) + "\n" for question in questions]
        (data / "arc_easy" / "test.jsonl").write_text("".join(lines))
        tasks = tuple(
            EvalTaskConfig(name=name, max_examples=99, max_new_tokens=8)
            for name in ("arc_easy", "gsm8k")
        )
        job = small_job(
            tmp_path / "job",
            stage="chat_eval",
            config={"chat_eval": ChatEvalConfig(tasks=tasks, prompts=()).tree()},
            inputs={"pretrain": weights, "task_data": data},
        )
        job.output.mkdir(parents=True)
        return job

    return make


def test_choices_are_answered_by_the_likeliest_letter(make, weights):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Pairs of letters: to this model a letter is as likely after one text as after another.
    rng = random.Random(3)
    questions = [question(i, "".join(rng.sample("ABCD", 2))) for i in range(30)]
    job = make(questions)
    metrics = foreign.run(job)
    rows = pq.read_table(job.output / "examples.parquet").to_pylist()
    model = AutoModelForCausalLM.from_pretrained(weights).eval()
    words = AutoTokenizer.from_pretrained(weights)
    expected = []
    for each in questions:
        text = each["messages"][0]["content"]
        if words.chat_template:
            ids, before = words.encode(f"<user>{text}<assistant>"), ""
        else:
            ids, before = [BOS, *words.encode(f"{text}\nAnswer:")], " "
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        letters = [words.encode(f"{before}{letter}")[-1] for letter in each["letters"]]
        expected.append(each["letters"][int(logits[letters].argmax())])
    assert [row["answer"] for row in rows] == expected
    assert len(set(expected)) > 2
    right = [row["answer"] == row["expected"] for row in rows]
    assert [row["correct"] for row in rows] == right
    assert metrics["arc_easy"] == sum(right) / 30
    assert metrics["arc_easy_low"] < metrics["arc_easy"] < metrics["arc_easy_high"]
    scores = json.loads((job.output / "scores.json").read_text())
    # Only lettered questions were asked: no mean, and no suite that could be taken for ours.
    assert (scores["chatcore"], scores["suite"], [*scores["tasks"]]) == (None, None, ["arc_easy"])
    assert {name for name in metrics if "core" in name} == set()


def test_letters_that_are_not_one_token_fail_the_task(make):
    job = make([question(1, "AÄ")])
    with pytest.raises(DataError, match="a letter of A, Ä is not one token after a question"):
        foreign.run(job)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('one\ntwo') }}", "one"),
        ("{{ messages[0].content.nothing.more }}", "'str object' has no attribute 'nothing'"),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(template, reason, make, weights, tmp_path):
    job = make([question(1)])
    broken = tmp_path / "broken"
    write_gpt2(broken, window=WINDOW, template=template)
    job.inputs["pretrain"] = broken
    with pytest.raises(DataError) as caught:
        foreign.run(job)
    assert str(caught.value) == f"its chat template fails: {reason}"


def test_without_the_package_there_is_one_line(weights, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="transformers is not installed") as caught:
        open_foreign(weights, CPU)
    assert caught.value.hint == "install it: pip install 'transformers>=5.0'"


def test_code_of_a_model_is_not_executed_and_damage_is_one_line(weights, tmp_path):
    marker = tmp_path / "executed"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    config["auto_map"]["AutoConfig"] = "code.Config"
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelError, match="transformers cannot load") as caught:
        open_foreign(tmp_path, CPU)
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((weights / name).read_bytes())
    data = (weights / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="transformers cannot load"):
        open_foreign(tmp_path, CPU)
