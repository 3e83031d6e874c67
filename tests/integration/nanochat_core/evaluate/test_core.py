"""CORE against a straight implementation of it, see core_reference.py.

That each verdict is nanochat's: tests/integration/bench/test_core_gpt2.py.
"""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from infra.launch.torchrun import run_job
from nanochat_core.errors import DataError
from nanochat_core.evaluate import base, core
from nanochat_core.evaluate.core import core_metric
from nanochat_core.evaluate.core_questions import encode
from nanochat_core.evaluate.core_tasks import open_suite
from nanochat_core.model.checkpoint import save_model
from nanochat_core.runtime.hardware.distributed import ALONE, World
from nanochat_core.runtime.progress import read_events
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


# What is wrong with a bundle is named, and costs no more than it must.

ENTRY = "{label: far, dataset_uri: x, icl_task_type: schema, num_fewshot: [-1]}"
NO_BUNDLE = [
    *(("core.yaml", f"icl_tasks: {tasks}") for tasks in ("3", "[", "[]", f"[{ENTRY}]")),
    ("eval_meta_data.csv", "Eval Task,Random baseline\nfar,x\n"),
]


def test_what_is_no_bundle_is_named(tmp_path, transcript):
    for name, text in NO_BUNDLE:
        write_bundle(tmp_path)
        (tmp_path / name).write_text(text)
        transcript.refused(text, DataError, partial(open_suite, max_per_task=None), tmp_path)


FAR, TABLE = "eval_data/multiple_choice/far.jsonl", "Eval Task,Random baseline\n"
NO_TASK = [
    *(("eval_meta_data.csv", f"{TABLE}{row}") for row in ("", "far,100\n", "far,nan\n")),
    *((FAR, text) for text in ("{}\n", "\n", '{"query": "x", "choices": ["a"], "gold": 1}\n')),
    ("eval_data/schema/contexts.jsonl", '{"context_options": "x"}\n'),
    ("eval_data/language_modeling/facts.jsonl", "[1]\n"),
]


def test_a_task_that_cannot_be_asked_fails_alone(tmp_path, transcript):
    for name, text in NO_TASK:
        write_bundle(tmp_path)
        (tmp_path / name).write_text(text)
        suite = open_suite(tmp_path, max_per_task=None)
        label = "far" if name.endswith("csv") else Path(name).stem
        transcript.check(f"{name} {text!r}", suite.failed[label])
        assert str(tmp_path) not in suite.failed[label]
        assert len(suite.tasks) + len(suite.failed) == len(TASKS)
        assert name.endswith("csv") or set(suite.failed) == {label}


def test_a_task_of_an_unknown_kind_and_a_missing_file_are_named(tmp_path):
    write_bundle(tmp_path)
    path = tmp_path / "core.yaml"
    path.write_text(path.read_text().replace("type: schema", "type: riddle"))
    (tmp_path / "eval_data/language_modeling/facts.jsonl").unlink()
    failed = open_suite(tmp_path, max_per_task=None).failed
    assert list(failed) == ["pronouns", "contexts", "facts"]
    assert "of type 'riddle'" in failed["contexts"]
    assert "facts.jsonl cannot be read" in failed["facts"]
    with pytest.raises(DataError, match="cannot be read"):
        open_suite(tmp_path / "nowhere", max_per_task=None)


def _mute(bundle, place):
    """Make an example of `facts` one that has no continuation."""
    path = bundle / "eval_data/language_modeling/facts.jsonl"
    lines = path.read_text().splitlines()
    lines[place] = json.dumps({**json.loads(lines[place]), "continuation": ""})
    path.write_text("\n".join(lines))


def test_an_example_of_which_nothing_can_be_scored_fails_its_task_alone(
    model, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(core, "BLOCK", 5)
    write_bundle(tmp_path)
    # A delimiter that ends in a space would leave the space to be said.
    path = tmp_path / "core.yaml"
    path.write_text(path.read_text().replace("Answer: ", "Answer:"))
    whole = core_metric(model, tokenizer, open_suite(tmp_path, max_per_task=None), world=ALONE)
    assert whole.core is not None
    for place in (3, 9):
        _mute(tmp_path, place)
    suite = open_suite(tmp_path, max_per_task=None)
    found = core_metric(model, tokenizer, suite, world=ALONE)
    assert found.core is None
    assert list(found.failed) == ["facts"]
    assert "has no continuation" in found.failed["facts"]
    assert found.tasks == whole.tasks[:-1]

    class Split(World):
        """A rank that gets what another one found."""

        def sum(self, tensor):
            return tensor

        def gather(self, item):
            found_by_ranks.append(item)
            return [*found_by_ranks]

    found_by_ranks = []
    for rank in (1, 0):
        world = Split(rank=rank, local_rank=rank, size=2)
        last = core_metric(model, tokenizer, suite, world=world)
    assert all(found_by_ranks)  # both ranks met such an example
    assert last.failed == found.failed


def damage_a_task(directory):
    """Write a bundle of which one task cannot be read."""
    path = write_bundle(directory) / "eval_data/schema/contexts.jsonl"
    path.write_text(path.read_text() + "{\n")


@pytest.mark.parametrize(
    ("damage", "failed", "reason"),
    [
        (damage_a_task, "contexts", "line 12 is no example"),
        (Path.mkdir, "core", "core.yaml cannot"),
    ],
    ids=["a task", "all of it"],
)
def test_a_damaged_bundle_costs_the_metric_and_nothing_else(
    make_job, model_dir, rows_dir, tmp_path, damage, failed, reason
):
    (tmp_path / "task_data").mkdir()
    damage(tmp_path / "task_data" / "core")
    inputs = {"pretrain": model_dir, "rows": rows_dir, "task_data": tmp_path / "task_data"}
    config = {"base_eval": {"eval_tokens": 128, "prompts": ["a"], "max_new_tokens": 3}}
    job = make_job("one", "nanochat_core.evaluate.base", inputs, config)
    metrics = base.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    assert scores["core"] is None
    assert bool(scores["suite"]) == (failed == "contexts")
    assert list(scores["failed"]) == [failed]
    assert reason in scores["failed"][failed] == metrics[f"{failed}_failed"]
    assert scores["failed"][failed] in metrics["core_failed"]
    assert str(tmp_path / "task_data") not in scores["failed"][failed]
    assert len(scores["tasks"]) == (len(TASKS) - 1 if failed == "contexts" else 0)
    assert scores["val_bpb"] == metrics["val_bpb"] > 0
    assert "core" not in metrics
    assert (job.output / "samples.jsonl").read_text().count("\n") == 1
    said = [e["text"] for e in read_events(job.events) if "text" in e]
    start = f"{failed} could not be evaluated, so there is no CORE"
    assert any(text.startswith(start) for text in said)
