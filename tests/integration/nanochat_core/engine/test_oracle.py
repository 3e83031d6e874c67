"""The engine on real models, beside `generate_naive`, token for token; fp32.

Logits differ in their last digits from those of the naive way, so prompts whose two likeliest
tokens are that close anywhere would be no test; with these weights and seeds there is none.
"""

import functools
import random
import re
from functools import partial

import pytest
import torch

from nanochat_core.engine.__main__ import main
from nanochat_core.engine.answer import Completion
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.native.runner import NativeRunner
from nanochat_core.engine.reference import generate_naive
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from tests.support.nanochat_core.engine.native_models import needs_kernels
from tests.support.nanochat_core.engine.scheduler_case import ask
from tests.support.nanochat_core.engine.torch_slots import VarlenRunner
from tests.support.nanochat_core.random_gpt import capacity_of, random_gpt

pytestmark = pytest.mark.torch

CONTEXT = 96
TOKENS = 12
PROMPTS = 16  # a shape
# (era's parts, windows, key/value heads)
SHAPES = {"head": (True, (20, 20, 96), 2), "january_windows_gqa": (False, (12, 12, 96), 1)}
ALL_PARAMS = (
    *(SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.7)),
    SamplingParams(top_k=7, temperature=0.8),
    SamplingParams(top_k=40, top_p=0.95, temperature=1.4),
)


def make_model(shape):
    """A random model of a shape."""
    has_parts, windows, num_kv_heads = SHAPES[shape]
    parts = dict.fromkeys(("value_embeds", "smear", "backout"), has_parts)
    return random_gpt(*windows, seed=1, num_kv_heads=num_kv_heads, **parts)


def prompts_of(shape, count):
    """Some short, many longer than a window, groups of them with the same beginning."""
    rng = random.Random(shape)
    starts = [[rng.randrange(256) for _ in range(70)] for _ in range(5)]
    return [
        [
            *rng.choice(starts)[: rng.choice((0, 10, 32, 70))],
            *(rng.randrange(256) for _ in range(rng.randint(1, 14))),
        ]
        for _ in range(count)
    ]


@functools.cache
def sampled_naively(shape, tokenizer):
    """Return two answers to each prompt of a shape, whose parameters take turns."""
    model, found = make_model(shape), []
    for i, prompt in enumerate(prompts_of(shape, PROMPTS)):
        settings = {"max_tokens": TOKENS, "seed": i, **vars(ALL_PARAMS[i % len(ALL_PARAMS)])}
        found.append(
            [generate_naive(model, tokenizer, prompt, sample_index=s, **settings) for s in range(2)]
        )
    return found


class StepBehind(DeviceRunner):
    """Steps are launched before the last are read, as on a GPU."""

    is_asynchronous = True


FP32 = {"dtype": torch.float32}
KINDS = {
    **{"torch": partial(TorchRunner, **FP32), "device": partial(StepBehind, **FP32)},
    "one call a layer": partial(VarlenRunner, **FP32),
    "native": partial(NativeRunner, precision="fp32", num_threads=2),
}


@pytest.mark.parametrize("kind", [pytest.param("native", marks=needs_kernels), *list(KINDS)[:3]])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_of_sampling_gives_the_naive_answers_on_every_runner(shape, kind, tokenizer):
    model = make_model(shape)
    engine = Engine(model, tokenizer)
    # So few pages that samples have to make room.
    capacity = capacity_of(model, num_slots=5, page_size=16, max_len=CONTEXT, num_pages=20)
    engine._open_runner = partial(KINDS[kind], capacity=capacity)
    asked = []
    for i, prompt in enumerate(prompts_of(shape, PROMPTS)):
        settings = {"max_tokens": TOKENS, "params": ALL_PARAMS[i % len(ALL_PARAMS)]}
        asked.append(ask(engine, prompt, seed=i, num_samples=2, **settings))
        if i % 3 == 0:
            gone = ask(engine, prompt, seed=i + 100, **settings)
            engine.scheduler.step()
            engine.scheduler.step()
            gone.handle.cancel()
    while engine.scheduler.step():
        pass
    found = [[one.completion(sample) for sample in range(2)] for one in asked]
    assert found == sampled_naively(shape, tokenizer)
    assert engine.scheduler.slots.counts.preemptions > 0
    assert engine.scheduler.slots.counts.prefix_tokens > 0


# `python -m nanochat_core.engine` compares the two, and times both.


@pytest.mark.parametrize(
    "options", [(), ("--temperature", "1", "--seed", "3", "--runner", "torch")]
)
def test_the_two_are_equal_and_timed(model_dir, capsys, options):
    assert main([str(model_dir), "--prompt", "ab", "--max-tokens", "9", *options]) == 0
    reference, engine, *answer, equal = capsys.readouterr().out.splitlines()
    assert reference.startswith("reference ")
    assert engine.startswith("engine ")
    assert "\n".join(answer).startswith("ab")
    assert re.fullmatch("equal: [1-9] tokens", equal)


def test_the_first_token_that_differs_is_named(model_dir, capsys, monkeypatch):
    def answer(self, *prompts, **settings):
        [[found]] = real(self, *prompts, **settings)
        ids = [*found.ids[:2], 66, *found.ids[3:]]
        return [[Completion(ids=ids, mask=found.mask, finished=found.finished)]]

    real = Engine.complete
    monkeypatch.setattr(Engine, "complete", answer)
    assert main([str(model_dir), "--prompt", "ab", "--max-tokens", "4"]) == 1
    assert "different from token 2 on: B" in capsys.readouterr().out


def test_what_cannot_be_used_is_one_line(model_dir, tmp_path, capsys):
    assert main([str(model_dir), "--device", "foo"]) == main([str(tmp_path)]) == 1
    error, hint, *other = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --device foo cannot be used here: ")
    assert hint == "hint: cpu, cuda or cuda:1"
    assert other[0] == f"error: {tmp_path} is not a model: it has no config.json"
