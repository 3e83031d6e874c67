"""Token ids in, token ids out: answers of a model, many prompts and samples at a time.

A prompt is read once, whatever the number of samples; prompts of different lengths share a batch;
an answer that ends leaves the batch. No answer grows past the model's sequence_len.

Randomness belongs to (seed, sample index, position), see `sampling`: a request draws the same
numbers alone and in a crowd, and in fp32 gives the same answer. Matrix products of another size
round differently, which in bf16 is enough to change a token now and then; the same batch always
gives the same answers.

Shapes: B rows of the batch, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanochat_core.engine.answer import Answer, Completion, end_tokens
from nanochat_core.engine.sampling import row_keys, sample
from nanochat_core.engine.tools import ToolTokens
from nanochat_core.errors import DataError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.kv_cache import KVCache
from nanochat_core.runtime.heartbeat import HEART
from nanochat_core.tokenizer.bpe import Tokenizer

# Answers that are over stay in the batch until they are this share of it (dropping them copies the
# cache of all others).
IDLE_SHARE = 1 / 8


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of a batch: which prompt it answers, with which randomness."""

    prompt: int  # index into the batch's prompts
    seed: int
    sample: int
    answer: Answer


class Engine:
    """Answers of `model`. The tokenizer is needed for stop tokens and for tool calls."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.ends = end_tokens(tokenizer)
        self._tools = ToolTokens.of(tokenizer)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Sequence[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield a (token_column, token_masks) per step: the next token of each sample.

        Mask 1: sampled by the model, 0: forced by a tool. A sample's last token is the one that
        ended it (`ends`); while others go on, its column repeats that token with mask 0. It stops
        when all have ended, after `max_tokens` columns, or when sequence_len is full. Raises
        DataError when the prompt is empty or leaves no room.
        """
        limit = self.limit_for(tokens, max_tokens)
        rows = [
            _Row(prompt=0, seed=seed, sample=i, answer=self._answer(limit))
            for i in range(num_samples)
        ]
        was_over = [False] * num_samples
        for _ in self._decode([tokens], rows, temperature=temperature, top_k=top_k):
            answers = [row.answer for row in rows]
            masks = [
                0 if over else answer.last_mask
                for answer, over in zip(answers, was_over, strict=True)
            ]
            was_over = [answer.is_over for answer in answers]
            yield [answer.last for answer in answers], masks

    def generate_batch(
        self, tokens: Sequence[int], num_samples: int = 1, **settings: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """(results, masks) of each sample: prompt and answer, without the token that ended it.

        `settings` are those of `generate`. The mask is 0 on the prompt and on forced tokens.
        """
        results = [list(tokens) for _ in range(num_samples)]
        masks = [[0] * len(tokens) for _ in range(num_samples)]
        ended = [False] * num_samples
        for column, column_mask in self.generate(tokens, num_samples, **settings):
            for i, (token, mask) in enumerate(zip(column, column_mask, strict=True)):
                ended[i] = ended[i] or token in self.ends
                if not ended[i]:
                    results[i].append(token)
                    masks[i].append(mask)
        return results, masks

    @torch.inference_mode()
    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_k: int | None,
        seeds: Sequence[int],
        max_rows: int = 128,
    ) -> list[list[Completion]]:
        """`num_samples` answers to each prompt, in the order of `prompts`; `seeds` has one each.

        At most `max_rows` answers are decoded together; prompts of like length share a batch.
        Raises DataError when a prompt is empty or leaves no room.
        """
        assert len(seeds) == len(prompts), f"{len(seeds)} seeds for {len(prompts)} prompts"
        limits = [self.limit_for(prompt, max_tokens) for prompt in prompts]
        answers = [[self._answer(limit) for _ in range(num_samples)] for limit in limits]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        requests = [(i, j) for i in order for j in range(num_samples)]
        for first in range(0, len(requests), max_rows):
            chunk = requests[first : first + max_rows]
            used = list(dict.fromkeys(i for i, _ in chunk))
            rows = [
                _Row(prompt=used.index(i), seed=seeds[i], sample=j, answer=answers[i][j])
                for i, j in chunk
            ]
            batch = [prompts[i] for i in used]
            for _ in self._decode(batch, rows, temperature=temperature, top_k=top_k):
                pass
        return [[answer.completion() for answer in group] for group in answers]

    def limit_for(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """How many tokens may follow `prompt`. Raises DataError when it is empty or too long."""
        room = self.model.config.sequence_len - len(prompt)
        if not prompt:
            raise DataError("the prompt is empty", hint="it needs at least <|bos|>")
        if room < 1:
            raise DataError(
                f"the prompt is {len(prompt)} tokens long, "
                f"the model reads {self.model.config.sequence_len} and needs one for the answer",
                hint="make it shorter",
            )
        return room if max_tokens is None else min(max_tokens, room)

    def _answer(self, limit: int) -> Answer:
        return Answer(self._tools, ends=self.ends, limit=limit)

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        rows: list[_Row],
        *,
        temperature: float,
        top_k: int | None,
    ) -> Iterator[None]:
        """Write every row's answer, one token of each per iteration, until all are over."""
        if all(row.answer.is_over for row in rows):
            return
        cache, logits, keys = self._prefill(prompts, rows)
        while True:
            chosen = sample(logits, keys, cache.lengths, temperature=temperature, top_k=top_k)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if not row.answer.is_over:
                    row.answer.take(token)
            HEART.beat("answering")
            yield
            going = [i for i, row in enumerate(rows) if not row.answer.is_over]
            if not going:
                return
            if len(rows) - len(going) >= max(1, IDLE_SHARE * len(rows)):
                kept = self._tensor(going)
                rows, cache, keys = [rows[i] for i in going], cache.keep(kept), keys[kept]
            last = self._tensor([row.answer.last for row in rows])
            counts = self._tensor([int(not row.answer.is_over) for row in rows])
            logits = self.model.decode(last[:, None], counts, cache)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], rows: list[_Row]
    ) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
        """Read the prompts once; cache, logits (B, V) and random keys (B,) of the rows."""
        longest = max(map(len, prompts))
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        # The last token of an answer is never read.
        max_len = max(len(prompts[row.prompt]) + row.answer.limit for row in rows) - 1
        cache = KVCache(
            self.model.config,
            num_rows=len(prompts),
            max_len=max_len,
            dtype=self.model.dtype,
            device=self._device,
        )
        counts = self._tensor([len(prompt) for prompt in prompts])
        logits = self.model.decode(self._tensor(padded), counts, cache)
        keys = row_keys(
            self._tensor([row.seed for row in rows]), self._tensor([row.sample for row in rows])
        )
        index = [row.prompt for row in rows]
        if index == list(range(len(prompts))):
            return cache, logits, keys
        return cache.keep(self._tensor(index)), logits[self._tensor(index)], keys

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def _tensor(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
