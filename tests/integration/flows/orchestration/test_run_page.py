"""What a run's page says, made from artifacts."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.build.build import Built
from flows.identity.manifest import File, Manifest
from flows.orchestration.run_page import (
    artifacts_text,
    plan_rows,
    read_scores,
    score_rows,
)
from flows.plan.plan import STATES
from flows.stages import STAGES
from tests.support.flows.house import House, make_run


def task(right: int, asked: int = 200) -> dict[str, Any]:
    share = right / asked
    return {
        "accuracy": share,
        "correct": right,
        "total": asked,
        "low": share - 0.05,
        "high": share + 0.05,
        "centred": share,
    }


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
    """The same, built here by a job that went on at step 120 of 320."""
    provenance = item.manifest.provenance
    segments = (
        {**provenance.segments[0], "first_step": 0, "last_step": 130},
        {**provenance.segments[0], "first_step": 120, "last_step": 320},
    )
    manifest = replace(item.manifest, provenance=replace(provenance, segments=segments))
    return replace(item, manifest=manifest, cached=False)


def test_the_plan_has_a_row_for_every_stage(built: House, house: House) -> None:
    rows = plan_rows(house.plan())
    assert [row["stage"] for row in rows] == [stage.name for stage in STAGES]
    assert {row["state"] for row in rows} == {f"+ {STATES['+']}"}
    assert {row["state"] for row in plan_rows(built.plan())} == {f"= {STATES['=']}"}


def test_scores_of_all_models_stand_side_by_side() -> None:
    base = {"val_bpb": 2.0655, "core": None, "intervals": {"val_bpb": [2.02, 2.11]}, "tasks": {}}
    mid = {"chatcore": 0.49, "intervals": {"chatcore": [0.45, 0.53]}, "tasks": {"mmlu": task(24)}}
    sft = {"chatcore": None, "intervals": {}, "tasks": {"mmlu": task(108), "gsm8k": task(10, 50)}}
    assert score_rows({"base": base, "mid": mid, "SFT": sft}) == [
        {
            "score": "bits per byte",
            "base": "2.066 (2.020 to 2.110)",
            "mid": "",
            "SFT": "",
            "questions": "",
        },
        {
            "score": "ChatCORE",
            "base": "",
            "mid": "0.490 (0.450 to 0.530)",
            "SFT": "",
            "questions": "",
        },
        {
            "score": "mmlu",
            "base": "",
            "mid": "12.0 % (7.0-17.0)",
            "SFT": "54.0 % (49.0-59.0)",
            "questions": "200",
        },
        {"score": "gsm8k", "base": "", "mid": "", "SFT": "20.0 % (15.0-25.0)", "questions": "50"},
    ]
    assert score_rows({}) == []


def test_scores_are_read_of_the_models_that_were_evaluated(
    full_house: House, made: dict[str, Built], tmp_path: Path
) -> None:
    assert read_scores(full_house.store, made) == {}  # of toys: no scores.json among their files
    sft = made["chat_eval_sft"]
    data = b'{"chatcore": 0.5, "tasks": {}}'
    sha256 = hashlib.sha256(data).hexdigest()
    file = File(path="scores.json", size=len(data), sha256=sha256, key="mine/scores.json")
    full_house.store.put(file.key, data)
    judged = replace(sft, manifest=replace(sft.manifest, files=(file,)))
    read = read_scores(full_house.store, {**made, "chat_eval_sft": judged})
    assert read == {"SFT": {"chatcore": 0.5, "tasks": {}}}


def test_a_runs_page_names_every_artifact_its_address_and_what_brings_it_here(
    made: dict[str, Built],
) -> None:
    built = {**made, "pretrain": resumed(made["pretrain"])}
    text = artifacts_text(RUN, built, "s3://bucket")
    for item in built.values():
        assert f"`{item.manifest.name}`" in text
        assert item.uri in text
    row = next(line for line in text.splitlines() if line.startswith("| pretrain "))
    assert "resumed at step 120/320" in row
    assert "| rl | Cached |" in text
    assert f"$ nanochat chat {made['rl'].manifest.name} --store s3://bucket" in text
    assert f"$ nanochat fetch {made['report'].manifest.name} --store s3://bucket" in text
    assert f"$ nanochat status {RUN.run} --store s3://bucket" in text


def test_a_run_that_failed_early_offers_no_model_to_talk_to(made: dict[str, Built]) -> None:
    text = artifacts_text(RUN, {"shards": made["shards"]}, "file:///my store")
    assert "nanochat chat" not in text
    assert "--store 'file:///my store'" in text
    assert RUN.run in artifacts_text(RUN, {}, "s3://bucket")
