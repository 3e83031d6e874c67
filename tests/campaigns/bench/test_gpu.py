"""The quarter of an hour on a GPU: every step of it, alone and beside nanochat, dry."""

import os
from pathlib import Path

import pytest

from bench.gpu.results import NEEDS_GPU
from bench.gpu.schedule import HEAD, JANUARY, STEPS
from tests.integration.bench.test_gpu import DryRun, dry_run

PEERLESS = {step.name for step in STEPS if step.peer is not None}
ON_A_CPU = {"memory", "serving", "core", "rollouts"}  # their dry run leaves nothing out
ALL = ("--minutes", "60")
QUESTIONS = {
    *("hellaswag", "arc", "boolq", "winograd", "lambada", "wikidata", "squad"),
    *("categorical", "generative"),
}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """A dry run of all steps."""
    return dry_run(tmp_path_factory.mktemp("gpu"), *ALL)


@pytest.mark.timeout(900)
def test_dry_every_step_runs_and_none_claims_what_only_a_gpu_gives(dry: DryRun) -> None:
    found = {name: step["status"] for name, step in dry.steps.items()}
    assert list(found) == [step.name for step in STEPS]
    assert {name for name, status in found.items() if status == "skipped"} == PEERLESS
    assert {name for name, status in found.items() if status == "ok"} == ON_A_CPU
    assert {found[name] for name in found.keys() - PEERLESS - ON_A_CPU} == {NEEDS_GPU}
    assert {name for name, step in dry.steps.items() if step["results"]} == (
        found.keys() - PEERLESS
    )
    assert "d12 we, rows" in dry.results("d12 rows")


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not {HEAD, JANUARY} <= os.environ.keys(), reason=f"{HEAD}, {JANUARY} name no checkouts"
)
def test_every_step_runs_beside_nanochat(tmp_path: Path) -> None:
    peers = {name: os.environ[name] for name in (HEAD, JANUARY)}
    dry = dry_run(tmp_path, *ALL, **peers)
    assert list(dry.steps) == [step.name for step in STEPS]
    assert {step["status"] for step in dry.steps.values()} == {"ok", NEEDS_GPU}
    asked, served = (dry.steps[name]["results"][-1] for name in ("core", "serving"))
    assert asked["equal"]["ours fp32"] == {case: [1, 1] for case in QUESTIONS}
    assert served["ratio_tokens_per_second"] > 0
    assert served["peer"].keys() == served["ours"].keys()
    sides = {
        name for case in ("d12", "d12 as shipped", "d20", "slice") for name in dry.results(case)
    }
    assert {"d12 HEAD, ours", "d12 HEAD, shipped", "d12 HEAD, L"} <= sides
    assert {"d20 HEAD, ours", "slice HEAD, ours", "profile slice HEAD, ours"} <= sides
