"""A decode step as a fixed sequence of Triton kernels.

    embed, then for every layer: qkv, attend, add, up, add; then head, sample

Above MOST_ROWS rows the products are torch's; `embed`, `attend` and `sample` are the same.

The kernels read and write the runner's own weights, pages and slots, and buffers made here, all at
fixed addresses: a CUDA graph can hold a step. On a CPU they run in Triton's interpreter, which
tests use.

Shapes: B rows of a step, C width, N outputs of the joined product, V vocabulary, H query heads, S
programs for a row and head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.engine.kernels import attention, products, rows
from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.runners.device_state import State
from nanochat_core.engine.runners.weights import Matrix, Weights
from nanochat_core.engine.sampling import cap
from nanochat_core.model.shape import head_dim

MOST_ROWS = 8  # by estimate: from how many rows torch's are faster has not been measured
TILE_BYTES = 32 << 10  # of a matrix, that a program holds in registers
MOST_SPLITS = 16  # programs for a row and head
MOST_TOKENS = 1 << 16  # of a vocabulary that one program can hold
LEAST_CAPABILITY = (8, 0)  # bf16
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
        most_rows: int,
        target: Target,
    ) -> None:
        """Allocate the buffers. tables: of each pool, (slots, pages) int32 on the device.

        num_candidates: that are ranked at most, for a top_k. most_rows: of a step.
        """
        self.weights, self.pools, self.tables, self.state = weights, pools, tables, state
        self._pool_of = {layer: i for i, pool in enumerate(pools) for layer in pool.group.layers}
        self._max_len, self._target = max_len, target
        config, device = weights.config, weights.embed.device
        self.stops = stop_tokens.new_full((_power_of_2(len(stop_tokens)),), -2)
        self.stops[: len(stop_tokens)] = stop_tokens
        self._ranked = _power_of_2(num_candidates)
        heads, width, most = weights.num_heads, config.width, max(most_rows, MOST_ROWS)

        def stream(*shape: int, dtype: torch.dtype = torch.float32, rows: int = most) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        self.x, self.mixed, self.middle = (stream(width, rows=MOST_ROWS) for _ in range(3))
        self.x0 = stream(width)
        self.raw = stream(max(layer.qkv.num_out for layer in weights.layers), rows=MOST_ROWS)
        self.attended = stream(width, dtype=weights.dtype)
        self.inner = stream(weights.layers[0].up.num_out, dtype=weights.dtype, rows=MOST_ROWS)
        self.logits = stream(config.vocab_size, rows=MOST_ROWS)
        self.position = stream(dtype=torch.int32)
        self.sums = stream(heads, MOST_SPLITS, weights.head_dim)
        self.stats = stream(heads, MOST_SPLITS, 2)
        self.arrived = stream(heads, dtype=torch.int32)
        self.scratch = stream(self._ranked, dtype=torch.int64)
        # What a model without these parts would have.
        ones = torch.ones(config.depth, device=device)
        self.resid = ones if weights.resid is None else weights.resid
        self.first = torch.zeros_like(ones) if weights.first is None else weights.first
        self.backout = torch.zeros_like(ones) if weights.backout is None else weights.backout

    def forward(self, slots: Tensor) -> Tensor:
        """Run the model on the token of each slot (B,) int64: logits (B, V) fp32, capped.

        They are overwritten by the next step.
        """
        assert len(slots) <= len(self.x0), f"{len(slots)} rows"
        if len(slots) > MOST_ROWS:
            return self._forward_many(slots)
        run(self.forward_launches(slots))
        return self.logits[: len(slots)]

    def step(self, slots: Tensor) -> Tensor:
        """Run a step: sample a token for each slot (B,) int64 and advance it. Returns (B,) int64,
        -1 for a stopped slot."""
        tokens = torch.empty_like(slots)
        run([self.sample_launch(slots, self.forward(slots), tokens)])
        return tokens

    def forward_launches(self, slots: Tensor) -> list[Launch]:
        """Return the launches from tokens to logits, of at most MOST_ROWS slots."""
        assert len(slots) <= MOST_ROWS, f"{len(slots)} rows"
        found = [self._embed(slots)]
        depth, x = self.weights.config.depth, self.x0
        for layer in range(depth):
            found += self._layer(layer, slots, x, copies=layer == depth // 2)
            x = self.x
        return [*found, self._head(len(slots))]

    def sample_launch(self, slots: Tensor, logits: Tensor, tokens: Tensor) -> Launch:
        """Return the launch from logits (B, V) to `tokens` (B,) int64."""
        state, vocab = self.state, self.weights.config.vocab_size
        args = (
            *(slots, self.position, logits),
            *(state.token, state.prev_token, state.length, state.limit, state.key, state.stopped),
            *state.params[:4],  # without the repetition penalty
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

    def _forward_many(self, slots: Tensor) -> Tensor:
        """Return the logits of any number of slots, by torch's products."""
        weights = self.weights
        depth, eps = weights.config.depth, weights.numerics.norm_eps

        def norm(x: Tensor) -> Tensor:
            return F.rms_norm(x, (x.size(-1),), eps=eps)

        run([self._embed(slots)])
        x = x0 = middle = self.x0[: len(slots)]
        for layer, block in enumerate(weights.layers):
            x = self.resid[layer] * x + self.first[layer].view(1) * x0
            run([self._attend(layer, slots, block.qkv(norm(x)))])
            x = x + block.out(self.attended[: len(slots)])
            x = x + block.down(F.relu(block.up(norm(x))).square_())
            if layer == depth // 2:
                middle = x
        x = x + self.backout[0] * middle
        return cap(weights.head(norm(x)), weights.numerics.softcap)

    def _embed(self, slots: Tensor) -> Launch:
        weights, state = self.weights, self.state
        smear = weights.embed if weights.smear is None else weights.smear
        args = (
            *(slots, state.token, state.prev_token, state.length, state.limit, state.stopped),
            *(weights.embed, smear, self.position, self.x0),
        )
        width = weights.config.width
        return self._launch(
            rows.embed,
            (len(slots),),
            args,
            num_warps=4,
            C=width,
            CP=_power_of_2(width),
            SMEAR=weights.smear is not None,
        )

    def _layer(self, layer: int, slots: Tensor, x: Tensor, *, copies: bool) -> list[Launch]:
        weights, width = self.weights, self.weights.config.width
        block, count, eps = weights.layers[layer], len(slots), weights.numerics.norm_eps
        qkv = self._product(
            products.qkv,
            block.qkv,
            count,
            (x, self.x0, self.resid, self.first, block.qkv.values, self.mixed, self.raw, layer),
            (block.qkv.num_out, eps),
            C=width,
        )
        out = self._product(
            products.add,
            block.out,
            count,
            (self.mixed, self.attended, block.out.values, self.x, self.middle),
            (width,),
            num_in=width,
            COPY=False,
        )
        up = self._product(
            products.up,
            block.up,
            count,
            (self.x, block.up.values, self.inner),
            (block.up.num_out, eps),
            C=width,
        )
        down = self._product(
            products.add,
            block.down,
            count,
            (self.x, self.inner, block.down.values, self.x, self.middle),
            (width,),
            num_in=block.down.num_in,
            COPY=copies,
        )
        return [qkv, self._attend(layer, slots, self.raw), out, up, down]

    def _attend(self, layer: int, slots: Tensor, raw: Tensor) -> Launch:
        weights, block = self.weights, self.weights.layers[layer]
        group = self._pool_of[layer]
        pool, table = self.pools[group], self.tables[group]
        at, window = pool.place[layer], min(pool.group.window, self._max_len)
        splits = min(_power_of_2(_divide_up(window, self._target.keys)), MOST_SPLITS)
        embed = weights.embed if block.value_embed is None else block.value_embed
        args = (
            *(slots, self.position, self.state.token, raw),
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
            BK=self._target.keys,
            P=pool.page_size,
            GATED=block.value_embed is not None,
        )

    def _head(self, count: int) -> Launch:
        weights, matrix = self.weights, self.weights.head
        return self._product(
            products.head,
            matrix,
            count,
            (self.x, self.middle, self.backout, matrix.values, self.logits),
            (matrix.num_out, weights.numerics.norm_eps, weights.numerics.softcap),
            C=matrix.num_in,
        )

    def _product(
        self,
        kernel: Any,
        matrix: Matrix,
        count: int,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        **constants: int,
    ) -> Launch:
        """Divide a matrix's outputs among programs: as many each as fit in registers, fewer where
        multiprocessors would have no program."""
        padded = _power_of_2(matrix.num_in)
        most = max(TILE_BYTES // (padded * matrix.values.itemsize), 1)
        outputs = most
        while (
            outputs > 1 and _divide_up(matrix.num_out, outputs) < self._target.num_multiprocessors
        ):
            outputs //= 2
        return self._launch(
            kernel,
            (_divide_up(matrix.num_out, outputs),),
            (*tensors, *numbers),
            num_warps=8 if padded > 4096 else 4,
            B=count,
            KP=padded,
            BN=outputs,
            **constants,
        )

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
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"it needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    if (dim := head_dim(config)) & (dim - 1):
        return f"its heads have {dim} channels, and a power of two is needed"
    if config.vocab_size > MOST_TOKENS:
        return f"its vocabulary has {config.vocab_size} tokens, {MOST_TOKENS} at most can be ranked"
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
