"""The program for half an hour on a GPU: every step of it, dry, on a CPU."""

import os
from pathlib import Path

import pytest

from bench.gpu.main import NEEDS_GPU
from bench.gpu.steps import HEAD, JANUARY, PARTS
from tests.integration.bench.test_gpu import dry_run

NAMES = [step.name for steps in PARTS.values() for step in steps]
PEERLESS = {s.name for steps in PARTS.values() for s in steps if s.peer is not None}
ON_A_CPU = {"checkpoint", "serving", "core", "rollouts"}  # their dry run leaves nothing out


@pytest.mark.timeout(900)  # twenty programs
def test_every_step_runs_and_none_claims_what_only_a_gpu_gives(tmp_path: Path) -> None:
    rows, printed = dry_run(tmp_path, "--budget", "800")
    found = {row["step"]: row["status"] for row in rows if "status" in row}
    assert sorted(found) == sorted(NAMES)
    assert {name for name, status in found.items() if status == "skipped"} == PEERLESS
    assert {name for name, status in found.items() if status == "ok"} == ON_A_CPU
    assert {found[name] for name in set(NAMES) - PEERLESS - ON_A_CPU} == {NEEDS_GPU}
    assert {row["step"] for row in rows if "result" in row} == set(NAMES) - PEERLESS
    for name in NAMES:
        assert f"\n{name:<16}" in printed


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not {HEAD, JANUARY} <= os.environ.keys(), reason=f"{HEAD}, {JANUARY} name no checkouts"
)
def test_every_step_runs_beside_nanochat(tmp_path: Path) -> None:
    peers = {name: os.environ[name] for name in (HEAD, JANUARY)}
    rows, _ = dry_run(tmp_path, "--budget", "1700", peers=peers)
    found = {row["step"]: row["status"] for row in rows if "status" in row}
    assert sorted(found) == sorted(NAMES)
    assert set(found.values()) == {"ok", NEEDS_GPU}
    sides = {row["result"]["name"] for row in rows if "result" in row and "name" in row["result"]}
    assert {"d12 HEAD, ours", "d12 HEAD, shipped", "d12 HEAD, L"} <= sides
    assert {"d20 HEAD, ours", "d24-fp8 HEAD, ours"} <= sides
