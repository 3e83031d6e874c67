"""Chooses the runner for a model on this machine, and the number of its KV cache pages.

`choose_runner` decides and counts without allocating, but for a measurement that is not cached yet;
`open_runner` opens what was chosen. The pages are bounded by the available memory: with less of it
fewer sequences are in flight at a time and the others wait. If not even one of full length fits,
the choice is refused.
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from nanochat_core.config import ModelConfig
from nanochat_core.engine.kv_cache.pages import most_pages
from nanochat_core.engine.native.build import Tiles
from nanochat_core.engine.native.runner import NativeRunner, page_bytes, unable
from nanochat_core.engine.native.weights import FORMS, Precision
from nanochat_core.engine.runner import Capacity, PageGroup, Runner
from nanochat_core.engine.runners import measured
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.speed import BYTES, SIDES_TOKENS, reduced, time_sides
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import head_dim, padded_vocab_size, value_embed_layers
from nanochat_core.runtime.hardware.device import compute_dtype
from nanochat_core.runtime.hardware.memory import memory_left
from nanochat_core.runtime.versions import note_version
from nanochat_core.scaling import num_lm_head_params, num_matrix_params

PRECISIONS = ("auto", "model", "fp32", "bf16", "int8")
# The fastest first; but "amx", which is `native` with AMX, only by a measurement or its name.
RUNNERS = {"cpu": ("native", "torch", "amx"), "cuda": ("triton", "cuda graphs", "torch")}
TILES: dict[str, Tiles] = {"native": "none", "amx": "amx"}  # of the runners in compiled kernels
TRIED = (9, 0)  # compute capability; from 8.0 on `triton` can be asked for
PAGE_SIZE = {"cpu": 16, "cuda": 256}  # tokens; what paged attention on GPUs is made for
SHARE = {"cpu": 0.25, "cuda": 0.5}  # of the available memory, unless a number of bytes is given
# Of one pass. While a CPU reads more, the other answers would stand still; a GPU is only then busy.
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
AHEAD = 512  # tokens besides the window that a short window's pages hold for each sequence
MEASURED_ANSWERS = 32  # at most, of a step that "auto" measures on a CPU


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The runner chosen for a model, the reason, and its memory; shown, and stored with results."""

    runner: str  # "native", "amx", "cuda graphs", "triton" or "torch"
    precision: str  # "fp32", "bf16" or "int8"
    reason: str
    threads: int  # of the CPU
    num_slots: int
    max_len: int
    page_size: int
    prefill_tokens: int  # of one pass
    groups: tuple[PageGroup, ...]
    weight_bytes: int
    pool_bytes: int

    def __str__(self) -> str:
        tokens = min((g.num_pages - 1) * self.page_size for g in self.groups)
        return (
            f"{self.runner} in {self.precision} ({self.reason}): "
            f"{_size(self.weight_bytes)} of weights, {_size(self.pool_bytes)} of KV cache "
            f"({tokens:,} tokens or more), up to {self.num_slots} at a time"
        )


def choose_runner(
    model: GPT,
    *,
    precision: str = "model",
    num_slots: int = 32,
    max_len: int | None = None,
    memory: int | None = None,
    threads: int | None = None,
    runner: str | None = None,
) -> Choice:
    """Return what `open_runner` would open, without allocating anything.

    precision: "model" (its own), "fp32", "bf16", "int8" or "auto": on a CPU the runner and the
    precision, of fp32 and bf16, that are the fastest of those that fit into `memory`, by cached
    measurements of one answer and of all slots; elsewhere the model's own. max_len: tokens of the
    longest sequence, the model's sequence_len at most. memory: bytes for weights and pages; None: a
    share of what is available now. threads: of the CPU; None: torch's. runner: one by name; None:
    the fastest.
    Raises ConfigError if it cannot run here or does not fit.
    """
    device = model.lm_head.weight.device
    if precision not in PRECISIONS:
        raise ConfigError(
            f"there is no precision '{precision}'", hint=f"one of: {', '.join(PRECISIONS)}"
        )
    if num_slots < 1:
        raise ConfigError(f"num_slots is {num_slots}, expected at least 1")
    is_measured = precision == "auto" and device.type == "cpu"
    if precision in ("auto", "model"):
        precision = "fp32" if model.dtype == torch.float32 else "bf16"
    name, reason = _choose(model, precision, runner)
    config, available = model.config, available_memory(device) if memory is None else memory
    longest = min(max_len or config.sequence_len, config.sequence_len)
    size = PAGE_SIZE.get(device.type, PAGE_SIZE["cpu"])
    prefill_tokens = PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"])
    groups_of = partial(_groups, config, longest, size, prefill_tokens)

    def pool_bytes(name: str, precision: str, groups: Iterable[PageGroup]) -> int:
        if name in TILES:
            return sum(g.num_pages * page_bytes(config, _native(precision), g) for g in groups)
        # The torch runner's pages are fp32 on a CPU whatever the precision, see torch_runner.py.
        kept = 4 if precision == "fp32" or device.type == "cpu" else 2
        layer = size * 2 * config.num_kv_heads * head_dim(config) * kept
        return sum(g.num_pages * len(g.layers) * layer for g in groups)

    # cos and sin in fp32, twice: building the table takes as much again for a moment.
    rotary = 2 * longest * head_dim(config) * BYTES["fp32"]

    def weights_of(name: str, precision: str) -> int:
        # The torch runners read the model's own tables where these are in their dtype.
        return weight_bytes(model, precision, copies_tables=name in TILES)

    def fitting(name: str, precision: str) -> int:
        """Return how many sequences fit: memory grows with their number."""
        room = available - weights_of(name, precision) - rotary
        return bisect_right(
            range(1, num_slots + 1),
            room,
            key=lambda count: pool_bytes(name, precision, groups_of(count)),
        )

    if is_measured:
        name, precision, reason = _fastest(model, runner, (name, precision, reason), fitting)
    weights, most = weights_of(name, precision), fitting(name, precision)
    if not most:
        need = weights + rotary + pool_bytes(name, precision, groups_of(1))
        raise ConfigError(
            f"a sequence of {longest} tokens and the weights in {precision} take {_size(need)} "
            f"of memory, {_size(available)} are available",
            hint="take a shorter context, a smaller model or bf16, or give it more memory",
        )
    groups = groups_of(most)
    return Choice(
        runner=name,
        precision=precision,
        reason=reason,
        threads=threads or torch.get_num_threads(),
        num_slots=num_slots,
        max_len=longest,
        page_size=size,
        prefill_tokens=prefill_tokens,
        groups=groups,
        weight_bytes=weights,
        pool_bytes=pool_bytes(name, precision, groups),
    )


def open_runner(
    model: GPT,
    *,
    stop_tokens: Iterable[int],
    on_choice: Callable[[Choice], None] | None = None,
    **options: Any,
) -> Runner:
    """Open a runner of `model` on the model's device; options: those of `choose_runner`.

    stop_tokens: see `Runner.decode`. on_choice: called once with what runs the model, before memory
    is taken; on a GPU after it, because the next runner takes the place of one whose kernels cannot
    be compiled or whose steps cannot be captured.
    """
    choice = choose_runner(model, **options)  # or refused, before anything is allocated

    def report(choice: Choice) -> None:
        note_version("runner", f"{choice.runner} in {choice.precision}")
        if on_choice is not None:
            on_choice(choice)

    capacity = Capacity(
        groups=choice.groups,
        page_size=choice.page_size,
        num_slots=choice.num_slots,
        max_len=choice.max_len,
        prefill_tokens=choice.prefill_tokens,
    )
    if choice.runner in TILES:
        report(choice)
        return NativeRunner(
            model,
            capacity,
            precision=_native(choice.precision),
            stop_tokens=stop_tokens,
            num_threads=choice.threads,
            tiles=TILES[choice.runner],
        )
    dtype, stops = compute_dtype(choice.precision), frozenset(stop_tokens)
    reasons: list[str] = []
    while choice.runner in ("triton", "cuda graphs"):
        by_kernels = choice.runner == "triton"
        try:
            graphs = DeviceRunner(
                model, capacity, dtype=dtype, stop_tokens=stops, graphs=True, kernels=by_kernels
            )
        except Exception as error:
            # torch's error for whatever CUDA refuses; Triton's compiler has several of its own.
            ours = isinstance(error, AssertionError)
            if ours or not (by_kernels or isinstance(error, RuntimeError)):
                raise
            first = str(error).strip().partition("\n")[0]
            why = f"it cannot capture a step: {type(error).__name__}: {first}"
            if options.get("runner") is not None:
                raise ConfigError(
                    f"{choice.runner} cannot run here: {why}",
                    hint="leave the choice of the runner open",
                ) from error
            following = "cuda graphs" if by_kernels else "torch"
            reasons.append(f"not {choice.runner}: {why}")
            choice = replace(choice, runner=following, reason="; ".join(reasons))
        else:
            report(choice)
            return graphs
        # The failed runner, a cycle of objects, holds as much memory as the next one takes.
        gc.collect()
        if model.lm_head.weight.is_cuda:
            torch.cuda.empty_cache()
    report(choice)
    return TorchRunner(model, capacity, dtype=dtype, stop_tokens=stops)


def page_groups(config: ModelConfig, *, num_pages: int) -> tuple[PageGroup, ...]:
    """Return a group for each window, in the order of their first layers, all with `num_pages`."""
    return tuple(
        PageGroup(
            window=window,
            layers=tuple(i for i, w in enumerate(config.windows) if w == window),
            num_pages=num_pages,
        )
        for window in dict.fromkeys(config.windows)
    )


def weight_bytes(model: GPT, precision: str, *, copies_tables: bool = False) -> int:
    """Return the bytes that a runner allocates for weights, besides the model's own.

    `copies_tables`: also of value embeddings that are in its dtype already.
    """
    config = model.config
    matrices = num_matrix_params(config, model.numerics) + num_lm_head_params(config)
    kept = 2 if precision == "int8" else BYTES[precision]  # of a number in a table
    rows, kv_width = padded_vocab_size(config), config.num_kv_heads * head_dim(config)
    tables = rows * config.width
    if copies_tables or model.dtype.itemsize != kept:
        tables += rows * kv_width * len(value_embed_layers(config))
    return matrices * BYTES[precision] + tables * kept


def available_memory(device: torch.device) -> int:
    """Return the bytes that a runner may take by default."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE["cuda"] * free)
    return int(SHARE["cpu"] * memory_left())


def _choose(model: GPT, precision: str, wanted: str | None) -> tuple[str, str]:
    """Return a runner's name and the reason for it. Raises ConfigError if none can run."""
    device = model.lm_head.weight.device.type
    known = RUNNERS.get(device, ("torch",))
    if wanted not in (None, *known):
        raise ConfigError(
            f"there is no runner '{wanted}' for {device}", hint=f"one of: {', '.join(known)}"
        )
    # Why faster runners cannot run is shown as the reason for the one chosen.
    reasons: list[str] = []
    for name in known if wanted is None else (wanted,):
        reason = _unable(name, model, precision)
        if reason is None and wanted is None and name == "triton":
            reason = _untried(model.lm_head.weight.device)
        if reason is None:
            return name, "; ".join(reasons) or ("asked for" if wanted else "the fastest here")
        reasons.append(f"not {name}: {reason}")
    raise ConfigError(
        f"nothing here runs a model in {precision}: {'; '.join(reasons)}",
        hint="take bf16 or fp32" if precision == "int8" else "leave the choice of the runner open",
    )


def _unable(name: str, model: GPT, precision: str) -> str | None:
    """Return why a runner cannot run here; None means that it can."""
    if name in TILES:
        return unable(model, _native(precision), tiles=TILES[name])
    if precision == "int8":
        return "it has no int8"
    if name == "triton":
        # Triton's absence is a reason, and torch's builds for CPUs come without it.
        if find_spec("triton") is None:
            return "the package triton is not installed"
        try:
            from nanochat_core.engine.runners import decode_kernels
        except ImportError as error:
            return f"the kernels do not fit this version of triton: {error}"
        return decode_kernels.unable(model.config, model.lm_head.weight.device)
    return None


def _untried(device: torch.device) -> str | None:
    """Return why the kernels are not chosen here by themselves; None: on such a GPU they ran."""
    if torch.cuda.get_device_capability(device) < TRIED:
        return f"only GPUs from compute capability {TRIED[0]}.{TRIED[1]} have run it"
    return None


def _fastest(
    model: GPT,
    wanted: str | None,
    otherwise: tuple[str, str, str],
    fitting: Callable[[str, str], int],
) -> tuple[str, str, str]:
    """Return the runner, the precision and the reason of the fastest side on a CPU, as measured.

    wanted: a runner's name; None means any. otherwise: those in the model's precision, returned if
    nothing fits. fitting: of a runner and a precision, how many answers fit into the memory.
    """
    able = {
        f"{name} in {precision}": (name, precision)
        for name in RUNNERS["cpu"]
        for precision in ("fp32", "bf16")
        if _unable(name, model, precision) is None
    }
    held = {side: fitting(*able[side]) for side in able}
    fits = [side for side in able if wanted in (None, able[side][0]) and held[side]]
    if not fits:
        return otherwise
    slots = max(held[side] for side in fits)
    # A power of two: with a little more or less memory available, the measurement is the same.
    most = 2 ** (min(slots, MEASURED_ANSWERS).bit_length() - 1)

    @cache
    def opened() -> dict[str, Runner]:
        options: dict[str, Any] = {"num_slots": most, "max_len": SIDES_TOKENS + 1, "threads": 1}
        open_side = partial(open_runner, reduced(model), stop_tokens=(), **options)
        return {s: open_side(runner=name, precision=p) for s, (name, p) in able.items()}

    dtype = str(model.dtype).removeprefix("torch.")
    counts = sorted({1, most})
    found = [
        measured.recall(
            measured.case_of(model.config, dtype, able, answers=count),
            lambda count=count: time_sides(opened(), answers=count),
        )
        for count in counts
    ]
    # A server has one answer in flight at one time and all slots in use at another: the geometric
    # mean weighs both alike. The less a side holds, the more steps it needs for all slots' answers.
    steps = {side: slots / max(held[side], 1) for side in able}
    means = {s: (steps[s] * math.prod(f[s] for f in found)) ** (1 / len(found)) for s in able}
    best = measured.fastest({side: means[side] for side in fits})
    why = f"the fastest measured with {' and '.join(map(str, counts))} at a time: " + (
        measured.describe(means, best)
    )
    _, _, reason = otherwise
    return *able[best], f"{reason}; {why}" if reason.startswith("not ") else why


def _native(precision: str) -> Precision:
    assert precision in FORMS, precision
    return precision


def _groups(
    config: ModelConfig, max_len: int, page_size: int, prefill_tokens: int, sequences: int
) -> tuple[PageGroup, ...]:
    """Return groups with pages for `sequences` of max_len tokens, and the scratch page."""

    def pages(window: int) -> int:
        ahead = max(AHEAD, page_size)
        count = 1 + sequences * most_pages(max_len, window, page_size, ahead=ahead)
        if window >= max_len:
            return count
        # A short window's pages must hold one prefill besides the window, even if max_len is less.
        # 3: the scratch page, and a page at each end that is used in part.
        count = max(count, 3 + -(-(window + min(ahead, max_len)) // page_size))
        # A pass of more tokens than AHEAD needs room for them once, not for each sequence.
        return count + max(0, prefill_tokens - AHEAD) // page_size

    return tuple(
        replace(group, num_pages=pages(group.window)) for group in page_groups(config, num_pages=0)
    )


def _size(count: int) -> str:
    """Format a number of bytes with its unit, as 1.23 MB."""
    step = min(int(math.log(max(count, 1), 1000)), 4)
    return f"{count / 1000**step:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[step]}"
