"""A decode step as a fixed sequence of Triton kernels.

    embed, then for every layer: qkv, attend, add, up, add; then head, sample

The kernels read and write the runner's own weights, pages and slots, and buffers made here, all at
fixed addresses: a CUDA graph can hold a step. On a CPU they run in Triton's interpreter, which
tests use.

Shapes: B rows of a step, C width, N outputs of the joined product, V vocabulary, H query heads, S
programs for a row and head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.engine.kernels import attention, products, rows
from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.runners.device_state import State
from nanochat_core.engine.runners.weights import Matrix, Weights
from nanochat_core.model.shape import head_dim

TILE_BYTES = 32 << 10  # of a matrix, that a program with one row holds in registers
# Of a program with more rows: rows, outputs, and bytes that it reads of each at once. So many rows
# and outputs fit into registers, with what is under way into shared memory.
MIN_ROWS, MAX_ROWS = 8, 32
MIN_OUTPUTS, MAX_OUTPUTS = 16, 32
STEP_BYTES = 512
MAX_SPLITS = 16  # programs for a row and head
MAX_TOKENS = 1 << 16  # of a vocabulary that one program can hold
MIN_CAPABILITY = (8, 0)  # bf16
PDL_CAPABILITY = (9, 0)


class Target(NamedTuple):
    """The GPU for which the launches are laid out."""

    num_multiprocessors: int
    keys: int = 64  # that a program of attention reads at once
    pdl: bool = False  # programmatic dependent launch

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Return the GPU's; on a CPU that of the interpreter: few programs, as it is slow."""
        if device.type != "cuda":
            return cls(num_multiprocessors=2, keys=16)
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return cls(properties.multi_processor_count, pdl=capability >= PDL_CAPABILITY)


class Launch(NamedTuple):
    """One kernel with its arguments."""

    kernel: Any  # made by triton.jit
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, int | bool]
    num_warps: int

    @property
    def options(self) -> dict[str, Any]:
        """The launch's keyword arguments."""
        return {
            **self.constants,
            "num_warps": self.num_warps,
            "launch_pdl": bool(self.constants["PDL"]),
        }


class DecodeKernels:
    """The kernels of one runner's decode steps, and their buffers."""

    def __init__(
        self,
        weights: Weights,
        pools: Sequence[PagePool],
        tables: Sequence[Tensor],
        state: State,
        *,
        stop_tokens: Tensor,
        num_candidates: int,
        max_len: int,
        max_rows: int,
        target: Target,
    ) -> None:
        """Allocate the buffers. tables: of each pool, (slots, pages) int32 on the device.

        num_candidates: that are ranked at most, for a top_k. max_rows: of a step.
        """
        self.weights, self.pools, self.tables, self.state = weights, pools, tables, state
        self._pool_of = {layer: i for i, pool in enumerate(pools) for layer in pool.group.layers}
        self._max_len, self._target = max_len, target
        config, device = weights.config, weights.embed.device
        self.stops = stop_tokens.new_full((_power_of_2(len(stop_tokens)),), -2)
        self.stops[: len(stop_tokens)] = stop_tokens
        self._ranked = _power_of_2(num_candidates)
        heads, width = weights.num_heads, config.width

        def stream(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self.x0, self.x, self.middle = (stream(width) for _ in range(3))
        self.stream, self.attended = (stream(width, dtype=weights.dtype) for _ in range(2))
        self.squares = stream(width)
        self.raw = stream(max(layer.qkv.num_out for layer in weights.layers))
        self.inner = stream(weights.layers[0].up.num_out, dtype=weights.dtype)
        self.logits = stream(config.vocab_size)
        self.position = stream(dtype=torch.int32)
        self.sums = stream(heads, MAX_SPLITS, weights.head_dim)
        self.stats = stream(heads, MAX_SPLITS, 2)
        self.arrived = stream(heads, dtype=torch.int32)
        self.scratch = stream(self._ranked, dtype=torch.int64)
        # What a model without these parts would have.
        ones = torch.ones(config.depth, device=device)
        self.ones = ones
        self.resid = ones if weights.resid is None else weights.resid
        self.first = torch.zeros_like(ones) if weights.first is None else weights.first
        self.backout = torch.zeros_like(ones) if weights.backout is None else weights.backout

    def forward(self, slots: Tensor) -> Tensor:
        """Run the model on the token of each slot (B,) int64: logits (B, V) fp32, capped.

        They are overwritten by the next step.
        """
        run(self.forward_launches(slots))
        return self.logits[: len(slots)]

    def step(self, slots: Tensor) -> Tensor:
        """Run a step: sample a token for each slot (B,) int64 and advance it. Returns (B,) int64,
        -1 for a stopped slot."""
        tokens = torch.empty_like(slots)
        run([self.sample_launch(slots, self.forward(slots), tokens)])
        return tokens

    def forward_launches(self, slots: Tensor) -> list[Launch]:
        """Return the launches from tokens to logits."""
        assert len(slots) <= len(self.x0), f"{len(slots)} rows"
        found = [self._embed(slots)]
        for layer in range(self.weights.config.depth):
            found += self._layer(layer, slots)
        return [*found, self._head(len(slots))]

    def sample_launch(self, slots: Tensor, logits: Tensor, tokens: Tensor) -> Launch:
        """Return the launch from logits (B, V) to `tokens` (B,) int64."""
        state, vocab = self.state, self.weights.config.vocab_size
        args = (
            *(slots, self.position, logits),
            *(state.token, state.prev_token, state.length, state.limit, state.key, state.stopped),
            *state.params,
            *(self.stops, self.scratch, tokens),
        )
        return self._launch(
            rows.sample,
            (len(slots),),
            args,
            num_warps=32,  # a row is one program, which holds all logits
            V=vocab,
            VP=_power_of_2(vocab),
            KP=self._ranked,
            num_stops=len(self.stops),
        )

    def _embed(self, slots: Tensor) -> Launch:
        weights, state = self.weights, self.state
        smear = weights.embed if weights.smear is None else weights.smear
        args = (
            *(slots, state.token, state.prev_token, state.length, state.limit, state.stopped),
            *(weights.embed, smear, self.resid, self.first),
            *(self.position, self.x0, self.x, self.stream, self.squares, len(slots)),
        )
        width = weights.config.width
        return self._launch(
            rows.embed,
            (len(slots),),
            args,
            num_warps=8,
            C=width,
            CP=_power_of_2(width),
            SMEAR=weights.smear is not None,
            **self._parts(weights.layers[0].down, len(slots)),
        )

    def _layer(self, layer: int, slots: Tensor) -> list[Launch]:
        weights, block, count = self.weights, self.weights.layers[layer], len(slots)
        eps, depth = weights.numerics.norm_eps, weights.config.depth
        # What the next layer's input, or lm_head's, is mixed with.
        mix = (self.resid, self.first, self.x0, layer + 1)
        if layer == depth - 1:
            mix = (self.ones, self.backout, self.middle, 0)

        def add(y: Tensor, matrix: Matrix, **constants: bool) -> Launch:
            tensors = (self.x, y, matrix.values, self.stream, self.squares, self.middle, *mix)
            return self._product(products.add, matrix, count, tensors, (), **constants)

        return [
            self._normed(products.qkv, block.qkv, count, self.raw, (eps,), block.down),
            self._attend(layer, slots),
            add(self.attended, block.out, COPY=False, MIX=False),
            self._normed(products.up, block.up, count, self.inner, (eps,), block.out),
            add(self.inner, block.down, COPY=layer == depth // 2, MIX=True),
        ]

    def _attend(self, layer: int, slots: Tensor) -> Launch:
        weights, block = self.weights, self.weights.layers[layer]
        group = self._pool_of[layer]
        pool, table = self.pools[group], self.tables[group]
        at, window = pool.place[layer], min(pool.group.window, self._max_len)
        # One more, because programs begin at multiples of their keys and windows do not.
        splits = min(_divide_up(window, self._target.keys) + 1, MAX_SPLITS)
        embed = weights.embed if block.value_embed is None else block.value_embed
        args = (
            *(slots, self.position, self.state.token, self.raw),
            *(torch.view_as_real(weights.rotary), embed, pool.keys[at], pool.values[at]),
            *(table, table.size(1), self.sums, self.stats, self.arrived, self.attended),
            *(block.qkv.num_out, window, weights.softmax_scale),
            *(weights.numerics.gate_scale, weights.numerics.norm_eps),
        )
        return self._launch(
            attention.attend,
            (weights.num_heads, splits, len(slots)),
            args,
            num_warps=4,
            H=weights.num_heads,
            K=weights.num_kv_heads,
            D=weights.head_dim,
            S=splits,
            SP=_power_of_2(splits),
            BK=self._target.keys,
            P=pool.page_size,
            GATED=block.value_embed is not None,
        )

    def _head(self, count: int) -> Launch:
        weights, matrix = self.weights, self.weights.head
        numbers = (weights.numerics.norm_eps, weights.numerics.softcap)
        before = weights.layers[-1].down
        return self._normed(products.head, matrix, count, self.logits, numbers, before)

    def _normed(
        self,
        kernel: Any,
        matrix: Matrix,
        count: int,
        out: Tensor,
        numbers: tuple[float, ...],
        before: Matrix,
    ) -> Launch:
        """Return a product of the normalised stream, which `add` of the matrix `before` wrote."""
        tensors = (self.x if count == 1 else self.stream, self.squares, matrix.values, out)
        parts = self._parts(before, count)
        return self._product(kernel, matrix, count, tensors, numbers, **parts)

    def _product(
        self,
        kernel: Any,
        matrix: Matrix,
        count: int,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        **constants: int,
    ) -> Launch:
        step, rows, outputs = self._tile(matrix, count)
        return self._launch(
            kernel,
            (_divide_up(matrix.num_out, outputs), _divide_up(count, rows)),
            (*tensors, count, matrix.num_out, *numbers),
            num_warps=8 if count == 1 and step > 4096 else 4,
            K=matrix.num_in,
            KP=step,
            RB=rows,
            BN=outputs,
            **constants,
        )

    def _tile(self, matrix: Matrix, count: int) -> tuple[int, int, int]:
        """Return the inputs that a program reads at once, its rows and its outputs: as many as
        fit, fewer outputs where multiprocessors would have no program."""
        itemsize = matrix.values.itemsize
        if count == 1:
            rows, step = 1, _power_of_2(matrix.num_in)
            fewest, outputs = 1, max(TILE_BYTES // (step * itemsize), 1)
        else:
            rows, step = min(max(_power_of_2(count), MIN_ROWS), MAX_ROWS), STEP_BYTES // itemsize
            fewest, outputs = MIN_OUTPUTS, MAX_OUTPUTS
        while outputs > fewest:
            if _divide_up(matrix.num_out, outputs) >= self._target.num_multiprocessors:
                break
            outputs //= 2
        return step, rows, outputs

    def _parts(self, matrix: Matrix, count: int) -> dict[str, int]:
        """Return constants: the programs of `add` of this matrix that write sums of squares."""
        parts = 0 if count == 1 else _divide_up(matrix.num_out, self._tile(matrix, count)[2])
        return {"PARTS": parts, "PP": _power_of_2(parts)}

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        num_warps: int,
        **constants: int,
    ) -> Launch:
        return Launch(kernel, grid, args, constants | {"PDL": self._target.pdl}, num_warps)


def unable(config: ModelConfig, device: torch.device) -> str | None:
    """Return why a model's steps cannot be kernels on a GPU; None means that they can."""
    if torch.version.cuda is None:
        return "torch is not built for CUDA"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"it needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if (dim := head_dim(config)) & (dim - 1):
        return f"its heads have {dim} channels, and a power of two is needed"
    if config.vocab_size > MAX_TOKENS:
        return f"its vocabulary has {config.vocab_size} tokens, {MAX_TOKENS} at most can be ranked"
    return None


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)


def _power_of_2(number: int) -> int:
    """Return the least power of two that is `number` at least."""
    return 1 << max(number - 1, 0).bit_length()


def run(launches: Sequence[Launch]) -> None:
    """Launch the kernels, in their order, on the current stream."""
    for launch in launches:
        launch.kernel[launch.grid](*launch.args, **launch.options)
