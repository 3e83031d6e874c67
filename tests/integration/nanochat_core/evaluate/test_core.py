"""CORE against a straight implementation of it, see core_reference.py.

That each verdict is nanochat's: tests/integration/bench/test_core_gpt2.py.
"""

import copy
import json

import pytest
import torch

from infra.launch.torchrun import run_job
from nanochat_core.evaluate import base, core
from nanochat_core.evaluate.core import core_metric
from nanochat_core.evaluate.core_questions import encode
from nanochat_core.evaluate.core_tasks import open_suite
from nanochat_core.model.checkpoint import save_model
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.evaluate.core_reference import (
    TASKS,
    likely_continuations,
    straight_core,
    write_bundle,
)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def speller(model):
    """A model that prefers letters, so that some of what it would say can be put in a bundle."""
    model = copy.deepcopy(model)
    letters = torch.zeros(len(model.lm_head.weight), dtype=torch.bool)
    letters[ord("a") : ord("z") + 1] = True
    with torch.no_grad():
        model.lm_head.weight[~letters] *= 0.2
    return model


@pytest.fixture(scope="module")
def bundle(speller, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("task_data") / "core"
    write_bundle(directory)
    likely = likely_continuations(speller, tokenizer, directory)
    assert len(likely) > 5
    return write_bundle(directory, likely=likely)


@pytest.fixture(scope="module")
def expected(speller, tokenizer, bundle):
    return straight_core(speller, tokenizer, bundle)


def test_it_is_what_a_straight_implementation_finds(speller, tokenizer, bundle, expected):
    suite = open_suite(bundle, max_per_task=None)
    found = core_metric(speller, tokenizer, suite, world=ALONE)
    assert {task.label: list(task.answers) for task in found.tasks} == expected["answers"]
    assert {t.label: t.accuracy.value for t in found.tasks} == pytest.approx(
        expected["accuracy"], abs=1e-6
    )
    assert found.core.value == pytest.approx(expected["core"], abs=1e-6)
    assert found.core.low < found.core.value < found.core.high
    shares = expected["accuracy"].values()
    assert min(shares) < 0.2 < 0.4 < max(shares)  # it is no game of all or nothing


def test_part_of_a_task_is_asked_as_nanochat_asks_part(speller, tokenizer, bundle):
    suite = open_suite(bundle, max_per_task=7)
    found = core_metric(speller, tokenizer, suite, world=ALONE)
    straight = straight_core(speller, tokenizer, bundle, most=7)
    assert {task.label: list(task.answers) for task in found.tasks} == straight["answers"]
    assert found.core.value == pytest.approx(straight["core"], abs=1e-6)


def test_shots_are_read_once_only_where_that_gives_the_same_tokens(tokenizer):
    texts = ["a\n\n", "a \n\n", "a.\n\n", "##\n\n", "\n\n", " \n \n"]
    tails = ["b", " b", "\nb", "##", "", "\t", "\u3000x", "'s", "\x1c#", "12"]
    for shots in texts:
        for first in tails:
            found = encode(tokenizer, shots, [first, *tails])
            whole = [[tokenizer.bos, *tokenizer.encode(shots + t)] for t in (first, *tails)]
            assert found == whole


def test_the_suites_digest_depends_on_what_was_asked(tmp_path):
    write_bundle(tmp_path)
    digests = {open_suite(tmp_path, max_per_task=most).digest for most in (None, None, 7)}
    assert len(digests) == 2
    path = tmp_path / "eval_data/schema/contexts.jsonl"
    path.write_text(path.read_text().replace("stone", "stones"))
    assert open_suite(tmp_path, max_per_task=None).digest not in digests


def test_two_processes_find_what_one_finds(
    make_job, speller, tokenizer, bundle, rows_dir, expected, tmp_path
):
    directory = tmp_path / "speller"
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer")
    save_model(
        directory, speller, tokenizer=directory / "tokenizer", optimizer={}, made_by="pretrain"
    )
    inputs = {"pretrain": directory, "rows": rows_dir, "task_data": bundle.parent}
    config = {"base_eval": {"eval_tokens": 128, "prompts": ["a"], "max_new_tokens": 3}}
    one, two = (
        make_job(name, "nanochat_core.evaluate.base", inputs, config) for name in ("one", "two")
    )
    metrics = base.run(one)
    run_job(two, processes=2, on_event=lambda event: None)
    assert metrics["core"] == pytest.approx(expected["core"], abs=1e-6)
    alone, together = (json.loads((j.output / "scores.json").read_text()) for j in (one, two))
    assert alone["core"] == together["core"] == metrics["core"]
    assert alone["tasks"] == together["tasks"]
    assert together["val_bpb"] == pytest.approx(alone["val_bpb"], abs=1e-5)
    assert {t["total"] for t in alone["tasks"].values()} == {count for *_, count, _ in TASKS}
    files = [(job.output / "examples.parquet").read_bytes() for job in (one, two)]
    assert files[0] == files[1]


def test_what_is_prepared_comes_in_order_and_its_errors_come_through():
    assert list(core.prepared(lambda i: i * i, range(7))) == [i * i for i in range(7)]
    assert list(core.prepared(str, [])) == []
    found = core.prepared(lambda i: 6 // (3 - i), range(9))
    assert [next(found) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(found)
