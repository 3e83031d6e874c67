"""Ten thousand requests of random length leave no memory behind, on a runner that computes."""

import gc
import random

import psutil
import pytest

from nanochat_core.engine.engine import Engine
from nanochat_core.engine.requests import Request, SamplingParams
from tests.support.nanochat_core.interop.models import a_model, a_tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]

REQUESTS = 10_000
ROUND = 500
MAX_BYTES = 8_000_000  # that may come after the first rounds, which fill pages and the allocator


@pytest.mark.parametrize("runner", [None, "torch"], ids=["best", "torch"])
def test_memory_is_flat_over_ten_thousand_requests(runner):
    engine = Engine(a_model("2026-03-14"), a_tokenizer(), num_slots=16, runner=runner)
    rng = random.Random(7)
    process = psutil.Process()
    seen = []
    for done in range(0, REQUESTS, ROUND):
        ended = []
        handles = [
            engine.submit(
                Request(
                    prompt=[rng.randrange(290) for _ in range(rng.randint(1, 60))],
                    sink=ended.append,
                    max_tokens=rng.randint(1, 12),
                    num_samples=rng.choice((1, 1, 2)),
                    params=SamplingParams(
                        temperature=rng.choice((0.0, 1.0)), top_k=rng.choice((None, 5))
                    ),
                    seed=done + i,
                )
            )
            for i in range(ROUND)
        ]
        for handle in rng.sample(handles, 10):
            handle.cancel()
        while engine.scheduler.step():
            pass
        del handles
        gc.collect()
        seen.append(process.memory_info().rss)
    assert not engine.scheduler.slots.running
    quarter = len(seen) // 4
    assert max(seen[quarter:]) - seen[quarter] < MAX_BYTES, seen
