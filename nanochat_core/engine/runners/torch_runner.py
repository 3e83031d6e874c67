"""The runner in plain torch, for any device on which the compiled kernels cannot run.

The host has every slot's state and controls each step: stopped rows cost nothing, and each row
attends to exactly the keys in its window. That suits a CPU, where a step is an ordinary call. A GPU
would have to wait for the host; see device_runner.py.

Shapes: B rows of a step, N tokens of a prefill, R of them whose logits are wanted, V vocabulary, H
query heads, K key/value heads, D head dim, G = H / K.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool, PageRange
from nanochat_core.engine.runner import Capacity, Chunk, Runner
from nanochat_core.engine.runners.forward import forward
from nanochat_core.engine.runners.prefill_attention import (
    PassAttention,
    attend_each,
    attend_together,
    find_varlen,
    sequences_of,
)
from nanochat_core.engine.runners.weights import Weights
from nanochat_core.engine.sampling import cap
from nanochat_core.model.gpt import GPT


class TorchRunner(Runner):
    """Runs `model`, see runner.py. Its weights are loaded at construction and by `refresh`.

    dtype: of the matrices and tables. On a CPU activations and pages are always fp32, in which
    torch's attention is several times as fast there. Elsewhere they are in `dtype` too.
    plain: matrices are stored as they are on a CPU, too, see `Matrix`.
    """

    def __init__(
        self,
        model: GPT,
        capacity: Capacity,
        *,
        dtype: torch.dtype,
        stop_tokens: Iterable[int],
        plain: bool = False,
    ) -> None:
        device = model.lm_head.weight.device
        vocab_size = model.config.vocab_size
        super().__init__(capacity, vocab_size=vocab_size, stop_tokens=stop_tokens, device=device)
        self._softcap = self._step_softcap = model.numerics.softcap
        stream = torch.float32 if device.type == "cpu" else dtype
        self.weights = Weights(
            model,
            dtype=dtype,
            stream_dtype=stream,
            max_len=self.max_len,
            plain=plain or device.type != "cpu",
        )
        self.pools = [
            PagePool(
                group,
                capacity,
                num_kv_heads=self.weights.num_kv_heads,
                head_dim=self.weights.head_dim,
                dtype=stream,
                device=device,
            )
            for group in self.groups
        ]
        self._varlen = find_varlen(device, stream, self.weights.head_dim)
        self._group_of = {layer: i for i, g in enumerate(self.groups) for layer in g.layers}

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

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """See runner.py."""
        logits = self._read(chunks)
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            self.length[chunk.slot], self.prev_token[chunk.slot] = end, chunk.tokens[-1]
        return logits

    def _read(self, chunks: Sequence[Chunk]) -> Tensor:
        spans = [(c.slot, c.start, c.start + len(c.tokens)) for c in chunks]
        columns = (
            [token for chunk in chunks for token in chunk.tokens],
            [token for c in chunks for token in (c.prev_token, *c.tokens[:-1])],
            np.concatenate([np.arange(start, end) for _, start, end in spans]),
            # Indices of the tokens' keys and values in each group's pages.
            *(np.concatenate([pool.places(*span) for span in spans]) for pool in self.pools),
        )
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        wanted = self._tensor(ends[[chunk.wants_logits for chunk in chunks]] - 1)
        last, scale = self.weights.config.depth - 1, self.weights.softmax_scale
        if self._varlen is None:
            attend = attend_each(self.pools, chunks, last_layer=last, scale=scale)
        else:
            sequences = sequences_of(chunks, self.pools, self.device)
            attend = attend_together(
                self._varlen, self.pools, sequences, wanted, last_layer=last, scale=scale
            )
        return self._read_columns(self._tensor(np.stack(columns)), attend, wanted)

    def _read_columns(self, columns: Tensor, attend: PassAttention, wanted: Tensor) -> Tensor:
        """Run the model on tokens, their predecessors, positions and places in each group's pages,
        rows of `columns`; return logits (R, V), capped."""
        tokens, prev_tokens, positions, *places = columns

        def attention_fn(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = self._group_of[layer]
            self.pools[at].write(layer, places[at], k, v)
            return attend(layer, at, q, k, v)

        logits = forward(self.weights, tokens, prev_tokens, positions, attention_fn, wanted)
        return cap(logits, self._softcap)

    def refresh(self) -> None:
        """See runner.py."""
        self.weights.refresh()

    def _step(self, slots: list[int]) -> Tensor:
        lengths, tokens = self.length[slots], self.token[slots]
        places: list[Tensor] = []
        ranges: list[list[PageRange]] = []
        for pool in self.pools:
            pages = pool.table[slots, lengths // self.page_size]
            places.append(self._tensor(pages * self.page_size + lengths % self.page_size))
            ranges.append(
                [
                    pool.find(slot, max(0, length - pool.group.window), length + 1)
                    for slot, length in zip(slots, lengths.tolist(), strict=True)
                ]
            )
        kv_heads, scale = self.weights.num_kv_heads, self.weights.softmax_scale

        def attention_fn(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = self._group_of[layer]
            pool = self.pools[at]
            pool.write(layer, places[at], k, v)
            # One call per row, as rows differ in length. The G queries of a key/value head become
            # G positions of one head: a single token needs no causal mask among them.
            rows = q.unflatten(1, (kv_heads, -1)).unsqueeze(1)  # (B, 1, K, G, D)
            outs = [
                F.scaled_dot_product_attention(row, *pool.read(layer, page_range), scale=scale)
                for row, page_range in zip(rows, ranges[at], strict=True)
            ]
            return (torch.cat(outs) if len(outs) > 1 else outs[0]).flatten(1, 2)

        prev_tokens = self._tensor(self.prev_token[slots])
        positions = self._tensor(lengths)
        logits = forward(self.weights, self._tensor(tokens), prev_tokens, positions, attention_fn)
        self.prev_token[slots], self.length[slots] = tokens, lengths + 1
        return logits

    def _tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)
