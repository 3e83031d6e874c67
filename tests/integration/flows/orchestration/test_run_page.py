"""Texts of the pages of a run and of a stage: artifacts, progress, what was measured."""

from dataclasses import replace

import pytest

from flows.building.build import Built
from flows.identity.manifest import Manifest
from flows.orchestration.run_page import artifacts_text, score_table
from flows.orchestration.stage_page import metric_rows
from flows.render.events import Loop
from flows.render.table import Table, texts
from flows.render.text import fenced
from tests.support.flows.house import House, make_run

RUN = replace(make_run("tiny-20261121t183842z-d1a5"), name="tiny")


def as_built(manifest: Manifest, *, cached: bool = True) -> Built:
    uri = f"s3://bucket/{manifest.stage}/{manifest.fingerprint}/manifest.json"
    return Built(manifest=manifest, uri=uri, cached=cached)


@pytest.fixture
def made(built: House) -> dict[str, Built]:
    """Every stage's artifact, in the table's order."""
    return {item.stage.name: as_built(_known(item.manifest)) for item in built.plan().stages}


def _known(manifest: Manifest | None) -> Manifest:
    assert manifest is not None
    return manifest


def resumed(item: Built) -> Built:
    """The same, built here by a job that resumed at step 120 of 320."""
    provenance = item.manifest.provenance
    segments = (
        {**provenance.segments[0], "first_step": 0, "last_step": 130},
        {**provenance.segments[0], "first_step": 120, "last_step": 320},
    )
    manifest = replace(item.manifest, provenance=replace(provenance, segments=segments))
    return replace(item, manifest=manifest, cached=False)


def test_a_runs_page_names_every_artifact_its_address_and_what_brings_it_here(made):
    built = {**made, "pretrain": resumed(made["pretrain"])}
    text = artifacts_text(RUN, built, "s3://bucket")
    for item in built.values():
        assert f"`{item.manifest.name}`" in text
        assert item.uri in text
    row = next(line for line in text.splitlines() if line.startswith("| pretrain "))
    assert "resumed at step 120/320" in row
    assert "| rl | Cached |" in text
    assert f"$ nanochat chat {made['rl'].manifest.name} --store s3://bucket" in text
    assert f"$ nanochat fetch {[*made.values()][-1].manifest.name} --store s3://bucket" in text
    assert f"$ nanochat status {RUN.run} --store s3://bucket" in text


def test_scores_are_a_row_each_with_a_column_for_each_model(made):
    measured = {"chatcore": 0.25, "chatcore_low": 0.2, "chatcore_high": 0.3, "questions": 7}
    manifest = made["chat_eval_rl"].manifest
    provenance = replace(manifest.provenance, metrics=measured)
    rl = replace(made["chat_eval_rl"], manifest=replace(manifest, provenance=provenance))
    assert score_table({**made, "chat_eval_rl": rl}).tree()[-1] | {"score": "chatcore"} == {
        **{"score": "chatcore", "pretraining": "", "midtraining": "", "SFT": ""},
        "RL": "0.25 (0.2 to 0.3)",
    }
    assert score_table({"shards": made["shards"]}).rows == []


def test_a_run_that_failed_early_offers_no_model_to_talk_to(made):
    text = artifacts_text(RUN, {"shards": made["shards"]}, "file:///my store")
    assert "nanochat chat" not in text
    assert "--store 'file:///my store'" in text
    assert RUN.run in artifacts_text(RUN, {}, "s3://bucket")


@pytest.mark.parametrize(
    ("step", "values", "text"),
    [
        (
            1200,
            {"loss": 3.2101234, "tokens_per_second": 4887.33, "mfu": 0.412},
            "step 1200/32000, loss 3.21, 4,887 tokens/s, 41.2 % MFU",
        ),
        (
            30,
            {"reward": 0.25, "answer_tokens": 17.4, "useful_share": 0.875, "seconds": 5.66},
            "step 30/32000, reward 0.25, answer_tokens 17.4, useful_share 0.875, 5.7 s a step",
        ),
    ],
)
def test_progress_names_the_step_and_what_was_measured(step, values, text):
    loop = Loop.of({"unit": "step", "step": step - 1, "total": 32000})
    loop.move({"step": step, "total": 32000, "values": values})
    assert str(loop) == text


def test_a_column_of_intervals_is_there_if_a_metric_has_one():
    metrics = {"core": 0.76254321, "core_low": 0.71957, "core_high": 0.7992, "steps": 24}
    assert metric_rows(metrics) == [
        {"metric": "core", "value": 0.762543, "95 % interval": "0.7196 to 0.7992"},
        {"metric": "steps", "value": 24, "95 % interval": ""},
    ]
    assert metric_rows({"device": "cpu"}) == [{"metric": "device", "value": "cpu"}]


def test_text_of_others_breaks_no_block_and_no_table():
    assert fenced("a ``` b").startswith("````text\n")
    text = Table(columns=texts("a", "b"), rows=[["x|y", "one\ntwo"]]).markdown()
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | one two |"
