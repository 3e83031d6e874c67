"""Where the system gives no more threads or memory the kernels say so, or do with what there is."""

import errno
import mmap
import os
import subprocess
import sys

import pytest
import torch

from nanochat_core.engine import speed
from nanochat_core.engine.native.memory import Arena
from tests.support.nanochat_core.engine.engine_case import needs_kernels

pytestmark = [pytest.mark.torch, needs_kernels]

# A process of its own: who may not have more address space cannot run tests.
LIMITED = """
import resource
from pathlib import Path
from nanochat_core.engine.native.runner import NativeRunner
import tests.support.nanochat_core.engine.native_models as models

open_engine = NativeRunner._open

def open_limited(self):
    self._spec.max_rows = max_rows
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, -1))
    return open_engine(self)

def answer(runner):
    return models.read(runner, 0, models.make_tokens(40, 1)).sum().item()

print(answer(models.make_runner(models.make_gpt(), num_threads=1)))
NativeRunner._open = open_limited
for num_threads, max_rows in ((65, 256), (1, 2**20)):  # 64 stacks are more than there may be
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    try:
        runner = models.make_runner(models.make_gpt(), num_threads=num_threads)
    except MemoryError as error:
        print(error)
    else:
        print(answer(runner))
        print(len(list(Path("/proc/self/task").iterdir())))
"""


def test_fewer_threads_give_the_same_answer_and_too_large_buffers_an_error_and_no_crash():
    found = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, (found.returncode, found.stderr)
    alone, crowd, threads, too_large = found.stdout.splitlines()
    assert crowd == alone
    assert int(threads) < 64
    assert too_large == "the kernels' buffers do not fit into memory"


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bandwidth_is_measured_where_weights_lie(monkeypatch, threads):
    monkeypatch.setattr(speed, "PROBE_BYTES", 2**22)
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.02)
    arenas = []
    zeros = Arena.zeros
    monkeypatch.setattr(Arena, "zeros", lambda self, *a: (arenas.append(self), zeros(self, *a))[1])
    assert speed.read_bandwidth(torch.device("cpu"), threads=threads) > 0
    assert len(arenas) == 1


def test_where_the_system_has_no_large_pages_memory_lies_on_small_ones(monkeypatch):
    class SmallPages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert Arena().zeros((3, 5), torch.float32).fill_(2).sum() == 30
