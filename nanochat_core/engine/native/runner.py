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

With `tiles` the products of matrices and of attention are AMX's. In bf16 these round otherwise than
the vector kernels, so a matrix takes them for any number of rows or for none: see kernels_matrix.h.
"""

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.engine.native.build import Tiles, load_kernels
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
from nanochat_core.engine.runner import (
    Capacity,
    Chunk,
    DecodeOutput,
    PageGroup,
    Pending,
    Runner,
)
from nanochat_core.engine.sampling import TINY
from nanochat_core.errors import ModelError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import head_dim
from nanochat_core.runtime.hardware.cpp_library import Unavailable

MAX_ROWS = 256  # of one pass; longer prompts take several passes, with the same result
# SamplingRule of kernels_sample.h.
_RULE = np.dtype([("temperature", np.float32), ("top_k", np.int32), ("key", np.int64)])


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
_SLOTS = ("length", "token", "prev_token", "stopped")
_SIZES = ("embedding_size", "smear_gate_size", "rotary_size", "slots_size", "stops_size")
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
        *((name, ctypes.c_void_p) for name in _SLOTS),
        ("rules", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in _SIZES),
    )


def unable(model: GPT, precision: Precision, *, tiles: Tiles = "none") -> str | None:
    """Return why this runner cannot run `model` here; None means that it can, and the kernels are
    built."""
    device = model.lm_head.weight.device
    if device.type != "cpu":
        return f"the model is on {device}, the kernels run on a CPU"
    if precision == "fp32" and tiles != "none":
        return "AMX multiplies bf16 and int8 only"
    try:
        load_kernels(FORMS.index(precision), tiles=tiles)
    except Unavailable as error:
        return str(error)
    return None


def page_bytes(config: ModelConfig, precision: Precision, group: PageGroup) -> int:
    """Return the bytes of one page of a group, for all of its layers."""
    # 2: keys and values.
    numbers = 2 * len(group.layers) * config.num_kv_heads * PAGE_SIZE * padded_head(config)
    return numbers * kept_dtype(precision).itemsize


class NativeRunner(Runner):
    """Runs `model`, see runner.py. Its weights are loaded at construction and by `refresh`."""

    def __init__(
        self,
        model: GPT,
        capacity: Capacity,
        *,
        precision: Precision,
        stop_tokens: Iterable[int],
        num_threads: int,
        tiles: Tiles = "none",
    ) -> None:
        """Load the kernels and pack the weights. `tiles`: as in load_kernels. Raises Unavailable if
        `unable` returns a reason."""
        config = model.config
        assert capacity.page_size == PAGE_SIZE, f"pages of {capacity.page_size} tokens"
        super().__init__(
            capacity,
            vocab_size=config.vocab_size,
            stop_tokens=stop_tokens,
            device=torch.device("cpu"),
        )
        num_slots = self.num_slots
        self._library = load_kernels(FORMS.index(precision), tiles=tiles)
        self._weights = NativeWeights(model, precision=precision, max_len=self.max_len)
        width = -(-self.max_len // PAGE_SIZE)
        self._tables = [np.zeros((num_slots, width), np.int32) for _ in self.groups]
        self._pools = [
            Arena().zeros((g.num_pages, page_bytes(config, precision, g)), torch.uint8)
            for g in self.groups
        ]
        self._rules = np.zeros(num_slots, _RULE)
        # A slot that needs what the kernels do not compute; one of them takes the slower way.
        self._is_special, self._wants_log_probs = np.zeros((2, num_slots), bool)
        self._stops = np.zeros(config.vocab_size, np.uint8)
        self._stops[[t for t in self.stop_tokens if 0 <= t < config.vocab_size]] = 1
        # Buffers of the calls and their addresses, made once and not in every step.
        self._slots, self._limits, self._out = np.zeros((3, num_slots), np.int32)
        self._pointers = (self._slots.ctypes.data, self._limits.ctypes.data, self._out.ctypes.data)
        # token, prev_token, position, slot, wanted
        self._rows = np.zeros((5, MAX_ROWS), np.int32)
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
        self, slot: int, params: SamplingParams, *, key: int, num_log_probs: int | None
    ) -> None:
        """See runner.py."""
        super().start(slot, params, key=key, num_log_probs=num_log_probs)
        top_k = min(max(params.top_k or 0, 0), self.vocab_size)
        # At least TINY: a smaller number is 0 in fp32, and 0 means the likeliest token.
        temperature = max(params.temperature, TINY) if params.temperature else 0.0
        self._rules[slot] = (temperature, top_k, key)
        self._is_special[slot] = params.temperature != 0.0 and params.top_p != 1.0
        self._wants_log_probs[slot] = num_log_probs is not None

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
            rows[1, at], rows[1, at + 1 : end] = c.prev_token, rows[0, at : end - 1]
            rows[2, at:end] = range(c.start, c.start + len(c.tokens))
            rows[3, at:end] = c.slot
            if c.wants_logits:
                wanted.append(end - 1)
            self.length[c.slot], self.prev_token[c.slot] = c.start + end - at, c.tokens[-1]
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
            token, prev_token, position, slot, place = (r.ctypes.data for r in self._rows)
            out = logits[done:].data_ptr()
            self._library.nf_read(
                self._engine, count, token, prev_token, position, slot, len(here), place, out
            )
            done += len(here)
        return logits[:, : self.vocab_size]

    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """See runner.py."""
        # + 1: the last token of a full text is returned but not read, and so needs no position.
        assert max(limits) <= self.max_len + 1, f"{max(limits)} tokens of {self.max_len}"
        count, at = len(slots), list(slots)
        if self._is_special[at].any() or self._wants_log_probs[at].any():
            return super().decode(slots, limits, num_steps)
        self._slots[:count], self._limits[:count] = slots, limits
        if len(self._out) < num_steps * count:
            self._out = np.zeros(num_steps * count, np.int32)
            self._pointers = (*self._pointers[:2], self._out.ctypes.data)
        self._library.nf_decode(
            self._engine, count, *self._pointers[:2], num_steps, self._pointers[2]
        )
        tokens = self._out[: num_steps * count].reshape(num_steps, count).tolist()
        output = DecodeOutput(tokens=tokens, log_probs=[])
        return lambda: output

    def refresh(self) -> None:
        """See runner.py."""
        self._weights.refresh()
        # The kernels hold a pointer to the weights, rewritten in place, and to this structure.
        self._spec.smear_lambda = self._weights.smear_lambda
        self._spec.backout_lambda = self._weights.backout_lambda

    def __del__(self) -> None:
        """End the kernels' threads and free their memory."""
        # getattr: construction may have failed before `_engine` was set.
        if engine := getattr(self, "_engine", None):
            self._library.nf_close(engine)

    def _step(self, slots: list[int]) -> Tensor:
        logits = torch.empty((len(slots), padded(self.vocab_size)))
        self._slots[: len(slots)] = slots
        self._library.nf_step(self._engine, len(slots), self._pointers[0], logits.data_ptr())
        return logits[:, : self.vocab_size]

    def _sample(
        self,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
        softcap: float | None = None,
    ) -> tuple[list[int], list[LogProbs | None]]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count = len(slots)
        at, where, out = np.array(slots, np.int32), np.array(positions, np.int32), self._out
        self._library.nf_sample(
            self._engine,
            count,
            at.ctypes.data,
            where.ctypes.data,
            logits.data_ptr(),
            logits.stride(0),
            self._pointers[2],
        )
        tokens: list[int] = out[:count].tolist()
        # The kernels sampled these rows too, without their other settings: replace the tokens.
        rows = self._is_special[at].nonzero()[0].tolist()
        if rows:
            special, places = [slots[i] for i in rows], [positions[i] for i in rows]
            for i, token in zip(
                rows, self.sampler.sample(special, logits[rows], places), strict=True
            ):
                tokens[i] = token
        return tokens, self.sampler.log_probs(slots, logits, tokens)

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
            **{name: getattr(self, name).ctypes.data for name in _SLOTS},
            rules=self._rules.ctypes.data,
            stops=self._stops.ctypes.data,
            embedding_size=weights.embedding.numel(),
            smear_gate_size=0 if weights.smear_gate is None else weights.smear_gate.numel(),
            rotary_size=min(weights.cos.numel(), weights.sin.numel()),
            slots_size=self.num_slots,
            stops_size=len(self._stops),
        )

    def _open(self) -> int:
        unsound = ctypes.c_int32()
        engine = self._library.nf_open(ctypes.byref(self._spec), ctypes.byref(unsound))
        # nf_open compares counts and sizes: a mismatch would be an access beyond a buffer.
        if unsound.value:
            raise ModelError(
                "the model's counts do not fit its weights: the kernels refuse them",
                hint="its config.json or its weights were changed: fetch or import the model again",
            )
        if not engine:
            raise MemoryError("the kernels' buffers do not fit into memory")
        return engine
