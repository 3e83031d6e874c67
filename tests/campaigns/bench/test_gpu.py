"""The program for half an hour on a GPU: every step of it beside nanochat, dry, on a CPU."""

import os
from pathlib import Path

import pytest

from bench.gpu.main import NEEDS_GPU
from bench.gpu.steps import HEAD, JANUARY
from tests.integration.bench.test_gpu import NAMES, dry_run


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
