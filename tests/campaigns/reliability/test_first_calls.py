"""The first calls of MKL's vector functions, by two threads in new processes, over and over.

The race that `choose_vml_kernels` excludes depends on the machine: without it nothing is asserted,
the number is reported. NANOCHAT_TRIALS is the number of processes of each kind.
"""

import json
import os
import subprocess
import sys

import pytest

from flows.identity.fingerprint import REPOSITORY
from tests.support.campaigns import Campaign

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

# Forks before OpenMP has a thread; prints how many processes have each digest of a rotary table.
STORM = """
import collections, hashlib, json, os, sys, torch
from nanochat_core.model.layers import rotary_table
from nanochat_core.runtime.hardware.device import choose_vml_kernels
from nanochat_core.scaling import numerics

def child(out):
    torch.set_num_threads(2)
    if sys.argv[2] == "chosen":
        choose_vml_kernels()
    tables = rotary_table(2560, 64, numerics("fp32"), torch.device("cpu"))
    os.write(out, hashlib.sha256(b"".join(t.numpy().tobytes() for t in tables)).digest())
    os._exit(0)

found = collections.Counter()
for _ in range(int(sys.argv[1])):
    source, out = os.pipe()
    if os.fork() == 0:
        child(out)
    os.close(out)
    with open(source, "rb") as file:
        found[file.read().hex()] += 1
    os.wait()
print(json.dumps(found))
"""


def test_two_threads_of_new_processes_compute_one_rotary_table(campaign: Campaign) -> None:
    trials = campaign.trials(300)
    chosen, free = (tables_of(trials, kind) for kind in ("chosen", "free"))
    others = trials - max(free.values())
    campaign.found(f"{len(chosen)} tables of {trials} processes; {others} others without a choice")
    assert list(chosen.values()) == [trials]
    assert set(chosen) <= set(free)


def tables_of(trials: int, kind: str) -> dict[str, int]:
    """Digest -> processes, of so many processes that choose the kernels first or not."""
    result = subprocess.run(
        [sys.executable, "-c", STORM, str(trials), kind],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(result.stdout)
