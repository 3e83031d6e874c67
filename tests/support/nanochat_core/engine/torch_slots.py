"""Slots and pages of the torch runner, as its tests hand them out."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runner import Chunk, DecodeOutput
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import row_key
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.engine.native_models import chunk
from tests.support.nanochat_core.random_gpt import capacity_of

LONGEST = 64
STOP = 256


def open_small(
    model: GPT, *, num_slots: int = 4, dtype: torch.dtype = torch.float32
) -> TorchRunner:
    """Pages of 4 tokens, enough for every slot; slot s begins with pages 16 s + 1 onwards."""
    return TorchRunner(
        model, dtype=dtype, capacity=capacity_of(model, num_slots=num_slots), stop_tokens=[STOP]
    )


def matrices_of(runner: TorchRunner) -> list[torch.Tensor]:
    """Return the values of all matrices, which every step reads whole."""
    weights = runner.weights
    found = [m for one in weights.layers for m in (one.qkv, one.out, one.up, one.down)]
    return [matrix.values for matrix in (*found, weights.head)]


def give_pages(runner: TorchRunner, slot: int, *, rng: random.Random | None = None) -> None:
    """All of a slot's pages, one after the other, or in any order."""
    count = runner.pools[0].table.shape[1]
    pages = [1 + count * slot + i for i in range(count)]
    if rng is not None:
        rng.shuffle(pages)
    for group in range(len(runner.groups)):
        runner.set_table(group, slot, 0, pages)


def read_in_pieces(
    runner: TorchRunner, prompts: list[list[int]], rng: random.Random
) -> torch.Tensor:
    """Prefill all prompts, in passes of chunks of random lengths; logits of the last tokens."""
    read = [0] * len(prompts)
    logits: dict[int, torch.Tensor] = {}
    while len(logits) < len(prompts):
        chunks: list[Chunk] = []
        for slot, prompt in enumerate(prompts):
            count = min(rng.randint(0, 12), len(prompt) - read[slot])
            if count:
                start = read[slot]
                read[slot] += count
                is_last = read[slot] == len(prompt)
                chunks.append(chunk(slot, prompt, start, read[slot], wants=is_last))
        if chunks:
            found = runner.prefill(chunks)
            done = [c.slot for c in chunks if c.wants_logits]
            logits.update(zip(done, found, strict=True))
    return torch.stack([logits[slot] for slot in range(len(prompts))])


def plain_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    window: int,
    scale: float,
) -> torch.Tensor:
    """What torch's varlen_attn is documented to compute, in plain operations."""
    counts, lengths = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert max_queries == max(counts)
    assert max_keys >= max(lengths)
    assert query_ends.dtype == key_ends.dtype == torch.int32
    outs = []
    k, v = (t[: sum(lengths)] for t in (k, v))  # keys after the last end are not read
    for one, keys, values in zip(q.split(counts), k.split(lengths), v.split(lengths), strict=True):
        keys, values = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (keys, values))
        # The last query stands at the last key.
        positions = torch.arange(len(keys) - len(one), len(keys))
        distance = positions[:, None] - torch.arange(len(keys))
        scores = torch.einsum("qhd,khd->hqk", one, keys) * scale
        scores[:, (distance < 0) | (distance > window)] = -torch.inf
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


class VarlenRunner(DeviceRunner):
    """Reads prompts as on a GPU: all chunks in one call of attention a layer."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._varlen = plain_varlen


def begin(
    runner: TorchRunner,
    prompts: list[list[int]],
    all_params: Sequence[SamplingParams],
    rng: random.Random,
) -> DecodeOutput:
    """Give each slot pages in any order, parameters and a prompt; sample the first tokens."""
    slots = range(len(prompts))
    for slot, params in zip(slots, all_params, strict=True):
        give_pages(runner, slot, rng=rng)
        runner.start(slot, params, key=row_key(5, slot), num_log_probs=None)
    lengths, last = [len(prompt) for prompt in prompts], [prompt[-1] for prompt in prompts]
    logits = runner.prefill([chunk(slot, prompts[slot], 0, lengths[slot]) for slot in slots])
    return runner.sample_first(slots, logits, lengths, last)


def prompts_of(count: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@torch.no_grad()
def expected(model: GPT, tokens: list[int]) -> torch.Tensor:
    """The model's own logits after the last token."""
    return model(torch.tensor([tokens]))[0, -1]
