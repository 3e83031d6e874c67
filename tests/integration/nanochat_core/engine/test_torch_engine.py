"""Engine and scheduler on the torch runners, as where no kernels can be had, beside the oracle."""

import random

import pytest

from nanochat_core.engine.engine import Engine
from nanochat_core.engine.reference import generate_naive
from nanochat_core.engine.requests import EndEvent, Request, SamplingParams
from nanochat_core.engine.runners import choose
from nanochat_core.engine.runners.torch_runner import TorchRunner
from tests.support.nanochat_core.engine.torch_slots import VarlenRunner

pytestmark = pytest.mark.torch

ALL_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=7, temperature=0.8),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.05, temperature=1.4),
    SamplingParams(repetition_penalty=1.6, top_k=40, top_p=0.95),
]


@pytest.fixture(params=[TorchRunner, VarlenRunner])
def open_engine(request, make_model, tokenizer, monkeypatch):
    """Open an engine on one of the runners."""
    monkeypatch.setattr(choose, "unable", lambda *_, **__: "this is a test")
    monkeypatch.setattr(choose, "TorchRunner", request.param)

    def make(**settings):
        engine = Engine(make_model(windows=(12, 64)), tokenizer, memory=10**8, **settings)
        assert type(engine.scheduler.runner) is request.param
        return engine

    return make


@pytest.fixture(scope="module")
def naive():
    """Answers to the crowd below by request and sample: the first test fills it for the others."""
    return {}


@pytest.mark.parametrize("num_slots", [3, 16])
def test_every_way_of_drawing_gives_the_naive_answers_in_a_ragged_crowd(
    open_engine, tokenizer, num_slots, naive
):
    engine, rng = open_engine(num_slots=num_slots), random.Random(1)
    tokens = {}
    ends = []
    for number in range(18):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]

        def sink(event, number=number):
            if isinstance(event, EndEvent):
                ends.append(event)
            elif event.token not in engine.ends:
                tokens.setdefault((number, event.sample), []).append(event.token)

        params, samples = ALL_PARAMS[number % len(ALL_PARAMS)], 1 + number % 2
        settings = {"max_tokens": 14, "seed": number}
        engine.submit(
            Request(prompt=prompt, sink=sink, num_samples=samples, params=params, **settings)
        )
        for index in range(samples):
            if (number, index) not in naive:
                naive[number, index] = generate_naive(
                    engine.model, tokenizer, prompt, sample_index=index, **settings, **vars(params)
                ).ids
    while engine.scheduler.step():
        pass
    assert {end.reason for end in ends} <= {"stop", "length"}
    assert {key: tokens.get(key, []) for key in naive} == naive
