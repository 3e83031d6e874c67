"""Functions compiled by torch: how many kernels they get."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from nanochat_core.runtime.hardware.compile import compiled

pytestmark = pytest.mark.torch


@pytest.fixture(params=["strict", "default"])
def strict(request):
    """Yield True where torch's operations have to be deterministic; forget what was compiled."""
    torch.use_deterministic_algorithms(request.param == "strict")
    torch._dynamo.reset()
    yield request.param == "strict"
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def test_strict_functions_are_compiled_for_each_shape_in_any_thread(strict, monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    double = compiled(lambda x: 2 * x)

    def run():
        for size in range(3, 15):  # more than torch compiles by default
            double(torch.ones(size))

    with ThreadPoolExecutor(1) as thread:  # as autograd runs backward passes on a GPU
        thread.submit(run).result()
    assert len(graphs) == (12 if strict else 2)
