"""The runner for a CPU in compiled kernels: passes torch's tensors to kernels.cpp.

A pass goes over rows: a token with its position and slot. The tokens of a prompt and the slots that
decode are rows alike, and a row's result depends on no other: the same request gives the same bits
alone and in a batch, prefilled at once or in chunks, with any number of threads.

Slots with only a temperature and a top_k are sampled in the kernels, several steps per call; others
by sampling.py, one step per call.

Precisions: "fp32" is the model's own arithmetic but for the order of sums; "bf16" has matrices,
tables, keys and values in bf16 and everything else in fp32; "int8" has matrices in 8 bits with a
scale for each output, and what they multiply in 8 bits with a scale for each token; the rest as in
bf16. Pages hold 16 tokens.
"""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.engine.native.build import Unavailable, load_kernels
from nanochat_core.engine.native.draws import Draws
from nanochat_core.engine.native.memory import Arena
from nanochat_core.engine.native.weights import (
    FORMS,
    PAGE_SIZE,
    LayerSpec,
    MatrixSpec,
    NativeWeights,
    Precision,
    kept_dtype,
    padded,
    padded_head,
)
from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.runner import Chunk, DecodeOutput, Done, PageGroup
from nanochat_core.errors import ModelError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import head_dim

MAX_ROWS = 256  # of one pass; longer prompts take several passes, with the same result


class GroupSpec(ctypes.Structure):
    """kernels_spec.h: GroupSpec."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("page_bytes", ctypes.c_size_t),
        ("table", ctypes.c_void_p),
    )


# Names and order are those of kernels_spec.h's Spec: a field out of place is memory misread.
_INTS = (
    *("form", "num_threads", "max_rows", "num_slots", "vocab", "depth", "num_groups"),
    *("table_width", "width", "real_width", "hidden", "num_heads", "num_kv_heads", "head_width"),
    *("real_head_width", "smear_channels", "has_scalars", "middle_layer"),
)
_SIZES = ("embedding_size", "smear_gate_size", "rotary_size", "slots_size", "parks_size")
_FLOATS = ("norm_eps", "qk_scale", "cap", "gate_scale", "smear_lambda", "backout_lambda")


class EngineSpec(ctypes.Structure):
    """kernels_spec.h: Spec."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _INTS),
        *((name, ctypes.c_float) for name in _FLOATS),
        ("embedding", ctypes.c_void_p),
        ("smear_gate", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("layers", ctypes.POINTER(LayerSpec)),
        ("groups", ctypes.POINTER(GroupSpec)),
        ("head", MatrixSpec),
        *((name, ctypes.c_void_p) for name in ("length", "token", "before", "parked")),
        ("rules", ctypes.c_void_p),
        ("parks", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in _SIZES),
    )


def unable(model: GPT, *, cache: Path | None = None) -> str | None:
    """Return why this runner cannot run `model` here; None means that it can, and the kernels are
    built."""
    device = model.lm_head.weight.device
    if device.type != "cpu":
        return f"the model is on {device}, the kernels run on a CPU"
    try:
        load_kernels(cache)
    except Unavailable as error:
        return str(error)
    return None


def page_bytes(config: ModelConfig, precision: Precision, group: PageGroup) -> int:
    """Return the bytes of one page of a group, for all of its layers."""
    # 2: keys and values.
    numbers = 2 * len(group.layers) * config.num_kv_heads * PAGE_SIZE * padded_head(config)
    return numbers * kept_dtype(precision).itemsize


class NativeRunner:
    """Runs `model`, see runner.py. Its weights are loaded at construction and by `refresh`."""

    page_size = PAGE_SIZE
    is_asynchronous = False

    def __init__(
        self,
        model: GPT,
        *,
        precision: Precision,
        groups: Sequence[PageGroup],
        num_slots: int,
        max_len: int,
        park_tokens: Iterable[int],
        num_threads: int,
        cache: Path | None = None,
    ) -> None:
        """Load the kernels and pack the weights. `max_len`: tokens of the longest sequence.
        `cache`: as in load_kernels. Raises Unavailable if `unable` returns a reason."""
        config = model.config
        self.groups, self.num_slots = tuple(groups), num_slots
        self.vocab_size, self.max_len = config.vocab_size, max_len
        self.park_tokens = frozenset(park_tokens)
        self._library = load_kernels(cache)
        self._weights = NativeWeights(model, precision=precision, max_len=max_len)
        width = -(-max_len // PAGE_SIZE)
        self._tables = [np.zeros((num_slots, width), np.int32) for _ in self.groups]
        self._pools = [
            Arena().zeros((g.num_pages, page_bytes(config, precision, g)), torch.uint8)
            for g in self.groups
        ]
        self.length, self.token, self.before = (np.zeros(num_slots, np.int32) for _ in range(3))
        self.parked = np.ones(num_slots, np.int32)
        self._draws = Draws(self._library, num_slots=num_slots, vocab_size=config.vocab_size)
        self._parks = np.zeros(config.vocab_size, np.uint8)
        self._parks[[t for t in self.park_tokens if 0 <= t < config.vocab_size]] = 1
        # Buffers of the calls and their addresses, made once and not in every step.
        self._slots, self._limits = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self._out = np.zeros(num_slots, np.int32)
        self._pointers = (self._slots.ctypes.data, self._limits.ctypes.data, self._out.ctypes.data)
        self._rows = np.zeros((5, MAX_ROWS), np.int32)  # token, before, position, slot, wanted
        self._spec = self._make_spec(model, precision, num_threads)
        self._engine = self._open()

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """See runner.py."""
        row = self._tables[group][slot]
        # The kernels check no page number: with a wrong one they would write anywhere in memory.
        assert 0 <= first <= len(row) - len(pages), f"entries {first}+{len(pages)} of {len(row)}"
        assert all(0 <= page < self.groups[group].num_pages for page in pages), f"pages {pages}"
        row[first : first + len(pages)] = pages

    def clear_table(self, slot: int) -> None:
        """See runner.py."""
        for table in self._tables:
            table[slot] = 0

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See runner.py."""
        self._pools[group][target] = self._pools[group][source]

    def start(
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """See runner.py."""
        self.parked[slot] = 1
        self._draws.start(slot, draw=draw, seed=seed, sample=sample, num_log_probs=num_log_probs)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """See runner.py."""
        self._draws.remember(slot, tokens)

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """See runner.py."""
        rows = np.empty((4, sum(len(c.tokens) for c in chunks)), np.int32)
        wanted: list[int] = []
        at = 0
        for c in chunks:
            end = at + len(c.tokens)
            assert c.start + len(c.tokens) <= self.max_len, f"{c.start} + {end - at} tokens"
            rows[0, at:end] = c.tokens
            # Each token's predecessor; that of the first one is from the chunk before.
            rows[1, at], rows[1, at + 1 : end] = c.before, rows[0, at : end - 1]
            rows[2, at:end] = range(c.start, c.start + len(c.tokens))
            rows[3, at:end] = c.slot
            if c.wants_logits:
                wanted.append(end - 1)
            self.length[c.slot], self.before[c.slot] = c.start + end - at, c.tokens[-1]
            at = end
        assert rows[0].min() >= 0, "a token is negative"
        assert rows[0].max() < self.vocab_size, f"token {rows[0].max()} of {self.vocab_size}"
        logits = torch.empty((len(wanted), padded(self.vocab_size)))
        done = 0  # rows of logits
        for first in range(0, at, MAX_ROWS):
            count = min(MAX_ROWS, at - first)
            self._rows[:4, :count] = rows[:, first : first + count]
            here = [row - first for row in wanted if first <= row < first + count]
            self._rows[4, : len(here)] = here
            token, before, position, slot, place = (r.ctypes.data for r in self._rows)
            out = logits[done:].data_ptr()
            self._library.nf_read(
                self._engine, count, token, before, position, slot, len(here), place, out
            )
            done += len(here)
        return logits[:, : self.vocab_size]

    def draw_first(
        self, slots: Sequence[int], logits: Tensor, lengths: Sequence[int], befores: Sequence[int]
    ) -> DecodeOutput:
        """See runner.py."""
        tokens, thought = self._draws.draw(self._engine, slots, logits, lengths)
        where = list(slots)
        self.length[where], self.before[where], self.token[where] = lengths, befores, tokens
        self.parked[where] = [token in self.park_tokens for token in tokens]
        return DecodeOutput(tokens=[tokens], log_probs=[thought] if thought else [])

    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Done:
        """See runner.py."""
        # + 1: the last token of a full text is returned but not read, and so needs no position.
        assert max(limits) <= self.max_len + 1, f"{max(limits)} tokens of {self.max_len}"
        if self._draws.wants_torch(slots):
            return self._decode_special(slots, limits, num_steps)
        count = len(slots)
        self._slots[:count], self._limits[:count] = slots, limits
        if len(self._out) < num_steps * count:
            self._out = np.zeros(num_steps * count, np.int32)
            self._pointers = (*self._pointers[:2], self._out.ctypes.data)
        at, limit, out = self._pointers
        self._library.nf_decode(self._engine, count, at, limit, num_steps, out)
        tokens = self._out[: num_steps * count].tolist()
        columns = [tokens[i : i + count] for i in range(0, len(tokens), count)]
        return Done(DecodeOutput(tokens=columns, log_probs=[]))

    def release(self, slot: int) -> None:
        """See runner.py."""
        self.parked[slot] = 1

    def refresh(self) -> None:
        """See runner.py."""
        self._weights.refresh()
        # The kernels hold a pointer to the weights, rewritten in place, and to this structure.
        self._spec.smear_lambda = self._weights.smear_lambda
        self._spec.backout_lambda = self._weights.backout_lambda

    def close(self) -> None:
        """End the kernels' threads and free their memory; the runner cannot be used after that."""
        if self._engine:
            self._library.nf_close(self._engine)
            self._engine = 0

    def __del__(self) -> None:
        # getattr: construction may have failed before `_engine` was set.
        if getattr(self, "_engine", None):
            self.close()

    def _decode_special(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Done:
        """Decode slots of which some need sampling.py: one step per call of the kernels."""
        limit_of = dict(zip(slots, limits, strict=True))
        for slot, limit in limit_of.items():
            self.parked[slot] |= int(self.length[slot] + 1 >= limit)
        tokens: list[list[int]] = []
        thought: list[list[LogProbs | None]] = []
        for _ in range(num_steps):
            going = [i for i, slot in enumerate(slots) if not self.parked[slot]]
            column = [-1] * len(slots)
            thoughts: list[LogProbs | None] = [None] * len(slots)
            if going:
                drawn = self._step([slots[i] for i in going], limit_of)
                for i, token, one in zip(going, *drawn, strict=True):
                    column[i], thoughts[i] = token, one
            tokens.append(column)
            thought.append(thoughts)
        wants = any(self._draws.num_log_probs[slot] is not None for slot in slots)
        return Done(DecodeOutput(tokens=tokens, log_probs=thought if wants else []))

    def _step(
        self, slots: list[int], limit_of: dict[int, int]
    ) -> tuple[list[int], list[LogProbs | None]]:
        """Run one step of slots that are not parked. Returns their tokens and log-probabilities."""
        logits = torch.empty((len(slots), padded(self.vocab_size)))
        self._slots[: len(slots)] = slots
        self._library.nf_step(self._engine, len(slots), self._pointers[0], logits.data_ptr())
        lengths: list[int] = self.length[slots].tolist()
        own = logits[:, : self.vocab_size]
        tokens, thought = self._draws.draw(self._engine, slots, own, lengths)
        for slot, token, length in zip(slots, tokens, lengths, strict=True):
            self.token[slot] = token
            self.parked[slot] = token in self.park_tokens or length + 1 >= limit_of[slot]
        return tokens, thought or [None] * len(slots)

    def _make_spec(self, model: GPT, precision: Precision, num_threads: int) -> EngineSpec:
        config, numerics, weights = model.config, model.numerics, self._weights
        for number, group in enumerate(self.groups):
            for index, layer in enumerate(group.layers):
                spec = weights.specs[layer]
                spec.group, spec.index, spec.window = number, index, group.window
        # ctypes does not keep tensors alive whose addresses it holds: `self` does.
        self._group_specs = (GroupSpec * len(self.groups))(
            *(
                GroupSpec(pool=pool.data_ptr(), page_bytes=pool.size(1), table=table.ctypes.data)
                for pool, table in zip(self._pools, self._tables, strict=True)
            )
        )
        return EngineSpec(
            form=FORMS.index(precision),
            num_threads=num_threads,
            # A decode step has a row for every slot, however many there are.
            max_rows=max(MAX_ROWS, self.num_slots),
            num_slots=self.num_slots,
            vocab=config.vocab_size,
            depth=config.depth,
            num_groups=len(self.groups),
            table_width=self._tables[0].shape[1],
            width=padded(config.width),
            real_width=config.width,
            hidden=padded(4 * config.width),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=padded_head(config),
            real_head_width=head_dim(config),
            smear_channels=numerics.smear_channels if config.smear else 0,
            has_scalars=config.residual_scalars,
            middle_layer=config.depth // 2 if config.backout else -1,
            norm_eps=numerics.norm_eps,
            qk_scale=numerics.qk_scale,
            cap=numerics.softcap,
            gate_scale=numerics.gate_scale,
            smear_lambda=weights.smear_lambda,
            backout_lambda=weights.backout_lambda,
            embedding=weights.embedding.data_ptr(),
            smear_gate=None if weights.smear_gate is None else weights.smear_gate.data_ptr(),
            cos=weights.cos.data_ptr(),
            sin=weights.sin.data_ptr(),
            layers=weights.specs,
            groups=self._group_specs,
            head=weights.lm_head.spec(),
            length=self.length.ctypes.data,
            token=self.token.ctypes.data,
            before=self.before.ctypes.data,
            parked=self.parked.ctypes.data,
            rules=self._draws.rules.ctypes.data,
            parks=self._parks.ctypes.data,
            embedding_size=weights.embedding.numel(),
            smear_gate_size=0 if weights.smear_gate is None else weights.smear_gate.numel(),
            rotary_size=min(weights.cos.numel(), weights.sin.numel()),
            slots_size=min(map(len, (self.length, self.token, self.before, self.parked))),
            parks_size=len(self._parks),
        )

    def _open(self) -> int:
        unsound = ctypes.c_int32()
        engine = self._library.nf_open(ctypes.byref(self._spec), ctypes.byref(unsound))
        # nf_open compares counts and sizes: a mismatch would be an access beyond a buffer.
        if unsound.value:
            raise ModelError("the model's counts do not fit its weights: the kernels refuse them")
        if not engine:
            raise MemoryError("the kernels' buffers do not fit into memory")
        return engine
