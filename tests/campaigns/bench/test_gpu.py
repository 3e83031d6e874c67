"""The program for half an hour on a GPU: every step of it, alone and beside nanochat, dry."""

import os
from pathlib import Path

import pytest

from bench.gpu.main import NEEDS_GPU
from bench.gpu.steps import HEAD, JANUARY, PARTS
from tests.integration.bench.test_gpu import DryRun, dry_run

NAMES = [step.name for steps in PARTS.values() for step in steps]
PEERLESS = {s.name for steps in PARTS.values() for s in steps if s.peer is not None}
ON_A_CPU = {"checkpoint", "serving", "core", "rollouts"}  # their dry run leaves nothing out
SHAPES = {"hellaswag", "arc", "boolq", "winograd", "lambada", "wikidata", "squad"}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """A dry run of all steps."""
    return dry_run(tmp_path_factory.mktemp("gpu"), "--budget", "800")


@pytest.mark.timeout(900)
def test_dry_every_step_runs_and_none_claims_what_only_a_gpu_gives(dry: DryRun) -> None:
    found = {row["step"]: row["status"] for row in dry.rows if "status" in row}
    assert sorted(found) == sorted(NAMES)
    assert {name for name, status in found.items() if status == "skipped"} == PEERLESS
    assert {name for name, status in found.items() if status == "ok"} == ON_A_CPU
    assert {found[name] for name in set(NAMES) - PEERLESS - ON_A_CPU} == {NEEDS_GPU}
    assert {row["step"] for row in dry.rows if "result" in row} == set(NAMES) - PEERLESS
    for name in NAMES:
        assert f"\n{name:<16}" in dry.printed


@pytest.mark.timeout(900)
def test_without_the_peer_the_benches_say_so_and_measure_us(dry: DryRun) -> None:
    served, asked = dry.result("serving"), dry.result("core")
    no_peer = "is not set: there is no peer to compare with"
    assert f"NANOCHAT_JAN_DIR {no_peer}" in dry.printed
    assert f"NANOCHAT_DIR {no_peer}" in (dry.logs / "core.log").read_text()
    assert "peer" not in served
    for figure in ("tokens_per_second", "one_first_token_ms", "slot_free_ms"):
        assert served["ours"][figure] > 0
    # CORE is one question of each shape.
    rates = {case: rate["ours fp32 per cpu second"] for case, rate in asked["rates"].items()}
    assert rates.keys() == SHAPES | {"categorical", "generative", "core"}
    assert rates["core"] == pytest.approx(len(SHAPES) / sum(1 / rates[case] for case in SHAPES))
    assert asked["ratios"] == asked["equal"] == {}


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not {HEAD, JANUARY} <= os.environ.keys(), reason=f"{HEAD}, {JANUARY} name no checkouts"
)
def test_every_step_runs_beside_nanochat(tmp_path: Path) -> None:
    peers = {name: os.environ[name] for name in (HEAD, JANUARY)}
    rows = dry_run(tmp_path, "--budget", "1700", **peers).rows
    found = {row["step"]: row["status"] for row in rows if "status" in row}
    assert sorted(found) == sorted(NAMES)
    assert set(found.values()) == {"ok", NEEDS_GPU}
    sides = {row["result"]["name"] for row in rows if "result" in row and "name" in row["result"]}
    assert {"d12 HEAD, ours", "d12 HEAD, shipped", "d12 HEAD, L"} <= sides
    assert {"d20 HEAD, ours", "d24-fp8 HEAD, ours"} <= sides
