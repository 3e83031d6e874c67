"""The runner in plain torch, for any device on which the compiled kernels cannot run.

The host has every slot's state and controls each step: parked rows cost nothing, and each row
attends to exactly the keys in its window. That suits a CPU, where a step is an ordinary call. A GPU
would have to wait for the host; see cuda_graphs.py.

Shapes: B rows of a step, N tokens of a prefill, R of them whose logits are wanted, V vocabulary, H
query heads, K key/value heads, D head dim, G = H / K.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.runner import Chunk, DecodeOutput, Done, PageGroup, Pending
from nanochat_core.engine.runners.forward import read_tokens
from nanochat_core.engine.runners.weights import Weights
from nanochat_core.engine.sampling import cap, log_probs, row_keys, sample_each
from nanochat_core.model.attention_backends import band
from nanochat_core.model.gpt import GPT

BLOCK = 128  # queries of a prefill that share one slice of keys and a mask


@dataclass(kw_only=True)
class Slot:
    """A slot's state, see runner.py."""

    length: int = 0
    before: int = -1
    token: int = -1
    parked: bool = True
    draw: SamplingParams = field(default_factory=SamplingParams)
    key: int = 0
    num_log_probs: int | None = None


class TorchRunner:
    """Runs `model`, see runner.py. Its weights are loaded at construction and by `refresh`.

    dtype: of the matrices and tables. On a CPU activations and pages are always fp32, in which
    torch's attention is several times as fast there. Elsewhere they are in `dtype` too.
    """

    is_asynchronous = False

    def __init__(
        self,
        model: GPT,
        *,
        dtype: torch.dtype,
        groups: Sequence[PageGroup],
        page_size: int,
        num_slots: int,
        max_len: int,
        park_tokens: Iterable[int],
    ) -> None:
        self.device = model.lm_head.weight.device
        self.page_size, self.num_slots, self.max_len = page_size, num_slots, max_len
        self.groups = tuple(groups)
        self.vocab_size = model.config.vocab_size
        self.park_tokens = frozenset(park_tokens)
        self._softcap = model.numerics.softcap
        stream = torch.float32 if self.device.type == "cpu" else dtype
        self.weights = Weights(model, dtype=dtype, stream_dtype=stream, max_len=max_len)
        self.pools = [
            PagePool(
                group,
                page_size=page_size,
                num_slots=num_slots,
                max_len=max_len,
                num_kv_heads=self.weights.num_kv_heads,
                head_dim=self.weights.head_dim,
                dtype=stream,
                device=self.device,
            )
            for group in self.groups
        ]
        self._group_of = {layer: i for i, g in enumerate(self.groups) for layer in g.layers}
        self.slots = [Slot() for _ in range(num_slots)]
        self._seen: Tensor | None = None  # (num_slots, V) bool; made for the first penalty

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """See runner.py."""
        self.pools[group].set_table(slot, first, pages)

    def clear_table(self, slot: int) -> None:
        """See runner.py."""
        for pool in self.pools:
            pool.clear_table(slot)

    @torch.inference_mode()
    def copy_page(self, group: int, source: int, target: int) -> None:
        """See runner.py."""
        self.pools[group].copy_page(source, target)

    def start(
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """See runner.py."""
        key = int(row_keys(torch.tensor([seed]), torch.tensor([sample])))
        self.slots[slot] = Slot(draw=draw, key=key, num_log_probs=num_log_probs)
        if draw.repetition_penalty != 1.0:
            if self._seen is None:
                shape = (self.num_slots, self.vocab_size)
                self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self._seen[slot] = False

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """See runner.py."""
        if self._seen is not None and self.slots[slot].draw.repetition_penalty != 1.0:
            self._seen[slot, self._tensor(tokens)] = True

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """See runner.py."""
        tokens = [token for chunk in chunks for token in chunk.tokens]
        befores = [t for c in chunks for t in (c.before, *c.tokens[:-1])]
        spans = [range(c.start, c.start + len(c.tokens)) for c in chunks]
        ends = np.cumsum([len(c.tokens) for c in chunks])
        wanted = [int(end) - 1 for c, end in zip(chunks, ends, strict=True) if c.wants_logits]
        # Indices of the tokens' keys and values in each group's pages.
        places = [
            torch.from_numpy(
                np.concatenate(
                    [
                        pool.places(c.slot, s.start, s.stop)
                        for c, s in zip(chunks, spans, strict=True)
                    ]
                )
            ).to(self.device)
            for pool in self.pools
        ]
        last = self.weights.config.depth - 1

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = self._group_of[layer]
            self.pools[at].write(layer, places[at], k, v)
            outs: list[Tensor] = []
            for chunk, end in zip(chunks, ends, strict=True):
                first, stop = int(end) - len(chunk.tokens), int(end)
                # Of the last layer only the token whose logits are wanted is computed.
                if layer == last:
                    if not chunk.wants_logits:
                        continue
                    first = stop - 1
                # A prompt read whole sees its own keys only: no need to gather them from pages.
                own = (k[first:stop], v[first:stop]) if chunk.start == 0 and layer != last else None
                outs.append(self._mix_chunk(layer, chunk, q[first:stop], own))
            return torch.cat(outs) if outs else q[:0]

        logits = read_tokens(
            self.weights,
            self._tensor(tokens),
            self._tensor(befores),
            self._tensor([position for span in spans for position in span]),
            mix,
            self._tensor(wanted),
        )
        logits = cap(logits, self._softcap)
        for chunk, span in zip(chunks, spans, strict=True):
            slot = self.slots[chunk.slot]
            slot.length, slot.before = span.stop, chunk.tokens[-1]
        return logits

    @torch.inference_mode()
    def draw_first(
        self, slots: Sequence[int], logits: Tensor, lengths: Sequence[int], befores: Sequence[int]
    ) -> DecodeOutput:
        """See runner.py."""
        tokens, thought = self._draw(slots, logits, lengths)
        for slot, token, length, before in zip(slots, tokens, lengths, befores, strict=True):
            state = self.slots[slot]
            state.length, state.before, state.token = length, before, token
            state.parked = token in self.park_tokens
        return DecodeOutput(tokens=[tokens], log_probs=[thought] if thought else [])

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """See runner.py."""
        columns: list[list[int]] = []
        column_probs: list[list[LogProbs | None]] = []
        # A slot at its limit has no token left to read; no step must write beyond its pages.
        limit_of = dict(zip(slots, limits, strict=True))
        for slot, limit in limit_of.items():
            if self.slots[slot].length + 1 >= limit:
                self.slots[slot].parked = True
        for _ in range(num_steps):
            going = [i for i, slot in enumerate(slots) if not self.slots[slot].parked]
            column = [-1] * len(slots)
            probs: list[LogProbs | None] = [None] * len(slots)
            if going:
                tokens, thought = self._step([slots[i] for i in going], limit_of)
                for i, token in zip(going, tokens, strict=True):
                    column[i] = token
                for i, one in zip(going, thought or [None] * len(going), strict=True):
                    probs[i] = one
            columns.append(column)
            column_probs.append(probs)
        wants = any(self.slots[slot].num_log_probs is not None for slot in slots)
        return Done(DecodeOutput(tokens=columns, log_probs=column_probs if wants else []))

    def release(self, slot: int) -> None:
        """See runner.py."""
        self.slots[slot].parked = True

    def refresh(self) -> None:
        """See runner.py."""
        self.weights.refresh()

    def _step(
        self, slots: list[int], limit_of: dict[int, int]
    ) -> tuple[list[int], list[LogProbs | None]]:
        """Run one step of slots that are not parked. Returns their tokens and log-probabilities."""
        states = [self.slots[slot] for slot in slots]
        places: list[Tensor] = []
        stretches = []
        for pool in self.pools:
            size, window = self.page_size, pool.group.window
            places.append(
                self._tensor(
                    [
                        int(pool.table[slot, s.length // size]) * size + s.length % size
                        for slot, s in zip(slots, states, strict=True)
                    ]
                )
            )
            stretches.append(
                [
                    pool.find(slot, max(0, s.length - window), s.length + 1)
                    for slot, s in zip(slots, states, strict=True)
                ]
            )
        kv_heads, scale = self.weights.num_kv_heads, self.weights.softmax_scale

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = self._group_of[layer]
            pool = self.pools[at]
            pool.write(layer, places[at], k, v)
            # One call per row, as rows differ in length. The G queries of a key/value head become
            # G positions of one head: a single token needs no causal mask among them.
            rows = q.unflatten(1, (kv_heads, -1)).unsqueeze(1)  # (B, 1, K, G, D)
            outs = [
                F.scaled_dot_product_attention(row, *pool.read(layer, stretch), scale=scale)
                for row, stretch in zip(rows, stretches[at], strict=True)
            ]
            return (torch.cat(outs) if len(outs) > 1 else outs[0]).flatten(1, 2)

        logits = read_tokens(
            self.weights,
            self._tensor([s.token for s in states]),
            self._tensor([s.before for s in states]),
            self._tensor([s.length for s in states]),
            mix,
        )
        positions = [s.length + 1 for s in states]
        tokens, thought = self._draw(slots, logits, positions, softcap=self._softcap)
        for slot, state, token in zip(slots, states, tokens, strict=True):
            state.before, state.token, state.length = state.token, token, state.length + 1
            state.parked = token in self.park_tokens or state.length + 1 >= limit_of[slot]
        return tokens, thought

    def _mix_chunk(
        self, layer: int, chunk: Chunk, q: Tensor, own: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Compute attention of a chunk's last tokens q (T, H, D). `own`: their k and v, if they are
        all keys that the chunk sees; None: read them from the pages."""
        pool = self.pools[self._group_of[layer]]
        window, end = pool.group.window, chunk.start + len(chunk.tokens)
        start = end - len(q)
        low = max(0, start - window)
        if own is None:
            keys, values = pool.read(layer, pool.find(chunk.slot, low, end))
        else:
            keys, values = (t.transpose(0, 1).unsqueeze(0) for t in own)
        q = q.transpose(0, 1).unsqueeze(0)  # (1, H, T, D)
        scale, gqa = self.weights.softmax_scale, q.size(1) != keys.size(1)
        # Every key is inside the window: SDPA's causal path needs no mask.
        if start == 0 and window >= end - 1:
            out = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=scale, enable_gqa=gqa
            )
            return out[0].transpose(0, 1)
        # In blocks, each with the keys of its windows: with one mask for all the CPU would also
        # multiply the keys that the mask hides.
        blocks: list[Tensor] = []
        for first in range(start, end, BLOCK):
            stop = min(first + BLOCK, end)
            seen = slice(max(0, first - window) - low, stop - low)
            mask = band(stop - first, seen.stop - seen.start, window, q.device)
            blocks.append(
                F.scaled_dot_product_attention(
                    q[:, :, first - start : stop - start],
                    keys[:, :, seen],
                    values[:, :, seen],
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=gqa,
                )
            )
        return torch.cat(blocks, dim=2)[0].transpose(0, 1)

    def _draw(
        self,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
        *,
        softcap: float | None = None,
    ) -> tuple[list[int], list[LogProbs | None]]:
        """Sample each slot's next token from its row of logits, and count it as seen.

        softcap: one that the logits have yet to go through; None: there is none left.
        """
        states = [self.slots[slot] for slot in slots]
        draws = [state.draw for state in states]
        seen = None
        if self._seen is not None and any(d.repetition_penalty != 1.0 for d in draws):
            seen = self._seen[self._tensor(slots)]
        keys = self._tensor([state.key for state in states])
        drawn = sample_each(logits, keys, self._tensor(positions), draws, seen, softcap)
        if self._seen is not None and seen is not None:
            self._seen[self._tensor(slots), drawn] = True
        return drawn.tolist(), self._log_probs(states, logits, drawn, softcap)

    def _log_probs(
        self, states: Sequence[Slot], logits: Tensor, drawn: Tensor, softcap: float | None
    ) -> list[LogProbs | None]:
        """Return the log-probabilities of rows that want them; an empty list if none does."""
        wants = [state.num_log_probs for state in states]
        rows = [i for i, number in enumerate(wants) if number is not None]
        if not rows:
            return []
        # One call with the most alternatives that a row wants; each row then takes its share.
        most = max(number for number in wants if number is not None)
        at = self._tensor(rows)
        logits = logits[at] if softcap is None else cap(logits[at], softcap)
        chosen, ids, values = log_probs(logits, drawn[at], most)
        found: list[LogProbs | None] = [None] * len(states)
        for row, *of in zip(rows, chosen.tolist(), ids.tolist(), values.tolist(), strict=True):
            top = tuple(zip(of[1], of[2], strict=True))[: wants[row]]
            found[row] = LogProbs(chosen=of[0], top=top)
        return found

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
