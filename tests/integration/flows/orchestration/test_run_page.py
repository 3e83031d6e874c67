"""What a run's page says, made from artifacts."""

from dataclasses import replace

import pytest

from flows.building.build import Built
from flows.identity.manifest import Manifest
from flows.orchestration.run_page import artifacts_text, score_table
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
