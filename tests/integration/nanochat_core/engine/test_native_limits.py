"""Where the system gives no more threads or memory the kernels say so, or do with what there is."""

import subprocess
import sys

import pytest
import torch

from nanochat_core.engine import speed
from nanochat_core.engine.native import build
from nanochat_core.engine.native.memory import Arena

REASON = build.unable_here()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}"),
]

# A process of its own: who may not have more address space cannot run tests.
LIMITED = """
import resource, sys
from pathlib import Path
from nanochat_core.engine.native.runner import NativeRunner
import tests.support.nanochat_core.engine.native_models as models

open_engine = NativeRunner._open

def open_limited(self):
    self._spec.max_rows = int(sys.argv[2])
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, -1))
    return open_engine(self)

def answer(runner):
    return models.read(runner, 0, models.make_tokens(40, 1)).sum().item()

print(answer(models.make_runner(models.make_gpt(), num_threads=1)))
NativeRunner._open = open_limited
try:
    runner = models.make_runner(models.make_gpt(), num_threads=int(sys.argv[1]))
except MemoryError as error:
    print(error)
else:
    print(answer(runner))
    print(len(list(Path("/proc/self/task").iterdir())))
"""


def run_limited(*, threads: int, rows: int) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(threads), str(rows)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, (found.returncode, found.stderr)
    return found.stdout.splitlines()


def test_with_fewer_threads_than_asked_for_the_answers_are_the_same() -> None:
    # 64 stacks are more than the process may have.
    alone, crowd, threads = run_limited(threads=65, rows=256)
    assert crowd == alone
    assert int(threads) < 64


def test_buffers_that_do_not_fit_are_an_error_and_no_crash() -> None:
    _, output = run_limited(threads=1, rows=2**20)
    assert output == "the kernels' buffers do not fit into memory"


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bandwidth_is_measured_where_weights_lie(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(speed, "PROBE_BYTES", 2**22)
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.02)
    arenas: list[Arena] = []
    zeros = Arena.zeros
    monkeypatch.setattr(Arena, "zeros", lambda self, *a: (arenas.append(self), zeros(self, *a))[1])
    assert speed.read_bandwidth(torch.device("cpu"), threads=threads) > 0
    assert len(arenas) == 1
