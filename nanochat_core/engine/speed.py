"""Measures decoding: time to the first token, tokens per second, share of the memory bandwidth.

It measures through the scheduler, as answers are really made. A decode step has to read all
matrices and the keys and values of its rows; those bytes over the memory's bandwidth are the least
time that a step can take. Embedding tables are not counted: a step reads a few rows of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from nanochat_core.config import ModelConfig
from nanochat_core.engine.native.memory import Arena
from nanochat_core.engine.requests import EndEvent, Event, Request, SamplingParams
from nanochat_core.engine.runner import Runner
from nanochat_core.engine.scheduler import Scheduler
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import head_dim
from nanochat_core.scaling import num_lm_head_params, num_matrix_params
from nanochat_core.tokenizer.bpe import Tokenizer

PROBE_BYTES = 2**28  # more than any cache
GPU_PROBE_BYTES = 2**31  # so that reading takes a hundred times as long as a launch
PROBE_SECONDS = 2.0
NEVER = -1  # no token
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of a number of a matrix
# Of `time_sides`: CPU seconds after which no further step is begun, tokens of an answer in a round,
# and how many times the fastest side's time excludes a side from further rounds.
SIDES_SECONDS, SIDES_TOKENS, TOO_SLOW = 0.035, 2, 3.0
SIDES_PARAMS = 2**23  # 34 MB in fp32: more than caches nearer than the third level


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measurements of one batch size: medians over rounds."""

    batch_size: int
    first_token: float  # seconds from the request to the first token of every answer
    step: float  # seconds
    tokens_per_second: float  # of all answers, the first tokens not counted
    bytes_per_step: int
    bandwidth_share: float  # of the memory's; above 1 where the model stays in a cache


def make_endless(runner: Runner, *, context: int) -> Scheduler:
    """Return a scheduler that ends answers at their limits only; `context` as there."""
    # Token -1 is never sampled: no tool call begins, and no token ends an answer.
    tools = ToolTokens(
        tokenizer=Tokenizer({bytes([i]): i for i in range(256)}),
        **dict.fromkeys(("python_start", "python_end", "output_start", "output_end"), NEVER),
    )
    return Scheduler(runner, tools, ends=frozenset(), context=context)


def measure_speed(
    scheduler: Scheduler,
    *,
    batch_size: int,
    prompt: Sequence[int],
    num_tokens: int,
    bytes_per_step: int,
    bandwidth: float,
    rounds: int = 3,
    params: SamplingParams = SamplingParams(top_k=50),  # noqa: B008 - frozen
) -> Speed:
    """Time answers to `prompt` by `batch_size` samples of `num_tokens` tokens: medians of `rounds`,
    after one round that warms up.

    The scheduler must not end answers early. bandwidth: bytes per second.
    """
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        scheduler.forget()  # or the prompt would be cached after the first round
        timed = time_answers(scheduler, prompt, batch_size, num_tokens, seed=number, params=params)
        if number:
            found.append(timed)
    first = statistics.median(one[0] for one in found)
    # - 1: the first token is timed apart.
    step = statistics.median(one[1] for one in found) / (num_tokens - 1)
    return Speed(
        batch_size=batch_size,
        first_token=first,
        step=step,
        tokens_per_second=batch_size / step,
        bytes_per_step=bytes_per_step,
        bandwidth_share=bytes_per_step / step / bandwidth,
    )


def time_answers(
    scheduler: Scheduler,
    prompt: Sequence[int],
    batch_size: int,
    num_tokens: int,
    *,
    seed: int,
    params: SamplingParams,
    on_first: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Return the seconds until every answer has a first token, and from there to the last token.

    on_first: called in between.
    """
    counts = [0] * batch_size
    waiting, came = batch_size, 0.0
    ends: list[EndEvent] = []

    def sink(event: Event) -> None:
        nonlocal waiting, came
        if isinstance(event, EndEvent):
            ends.append(event)
            return
        counts[event.sample] += 1
        if counts[event.sample] == 1:
            waiting -= 1
            if not waiting:
                on_first()
                came = time.perf_counter()

    # Kernels run asynchronously: without waiting, the clock would time their launches.
    wait_for_gpu()
    began = time.perf_counter()
    scheduler.submit(
        Request(
            prompt=prompt,
            sink=sink,
            num_samples=batch_size,
            max_tokens=num_tokens,
            params=params,
            seed=seed,
        )
    )
    while scheduler.step():
        pass
    wait_for_gpu()
    seconds = time.perf_counter() - began
    assert counts == [num_tokens] * batch_size, f"{counts} tokens, {[e.error for e in ends]}"
    return came - began, seconds - (came - began)


def time_sides(sides: Mapping[str, Runner], *, answers: int) -> dict[str, float]:
    """Return the CPU seconds of a decode step of `answers` sequences by each side: the least of
    several rounds, in which the sides take turns.

    On one thread and in CPU seconds, which other programs disturb least: threads that wait for each
    other would count as work. Every side gets a first round, which counts as well, and further ones
    as long as SIDES_SECONDS are not over.
    """
    schedulers = {name: make_endless(r, context=SIDES_TOKENS + 1) for name, r in sides.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_sides(schedulers, answers)
    finally:
        torch.set_num_threads(threads)


def _time_sides(schedulers: Mapping[str, Scheduler], answers: int) -> dict[str, float]:
    best: dict[str, float] = {}
    until, number = time.process_time() + SIDES_SECONDS, 0
    while number == 0 or time.process_time() < until:
        for name, scheduler in schedulers.items():
            if number and (
                time.process_time() >= until or best[name] > TOO_SLOW * min(best.values())
            ):
                continue
            reached: list[float] = []
            time_answers(
                scheduler,
                [0],
                answers,
                SIDES_TOKENS,
                seed=number,
                params=SamplingParams(temperature=0.0),  # no draw, which costs all alike
                on_first=lambda reached=reached: reached.append(time.process_time()),
            )
            seconds = (time.process_time() - reached[0]) / (SIDES_TOKENS - 1)
            best[name] = min(best.get(name, seconds), seconds)
        number += 1
    return best


@torch.no_grad()
def reduced(model: GPT) -> GPT:
    """Return a model to time sides with: of the same layers, but only as many of them, and of the
    vocabulary in proportion, as have SIDES_PARAMS parameters, at least one; weights are random."""
    config = model.config
    whole = num_matrix_params(config, model.numerics) + num_lm_head_params(config)
    depth = min(config.depth, max(1, config.depth * SIDES_PARAMS // whole))
    vocab = -(-config.vocab_size * depth // config.depth)
    small = GPT(
        replace(config, depth=depth, vocab_size=vocab, windows=config.windows[-depth:]),
        model.numerics,
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in small.parameters():
        parameter.uniform_(-0.1, 0.1, generator=generator)  # equal logits would be slow to rank
    return small.eval()


def wait_for_gpu() -> None:
    """Wait until all launched kernels are done; return at once if no GPU is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def bytes_per_step(model: GPT, runner: str, precision: str, *, rows: int, length: int) -> int:
    """Return the bytes that a decode step of a runner reads: all matrices, and the keys and values
    of `rows` sequences of `length` tokens."""
    config = model.config
    matrices = num_matrix_params(config, model.numerics) + num_lm_head_params(config)
    # int8 is of matrices only; and on a CPU the torch runner's pages are always fp32.
    kept = BYTES["bf16" if precision == "int8" else precision]
    if runner == "torch" and model.lm_head.weight.device.type == "cpu":
        kept = BYTES["fp32"]
    return matrices * BYTES[precision] + rows * past_bytes(config, length, kept)


def past_bytes(config: ModelConfig, length: int, kept: int) -> int:
    """Return the bytes of keys and values that a sequence's next token sees; `kept` bytes each."""
    # window + 1: the keys to the left and the query's own. * 2: keys and values.
    seen = sum(min(window + 1, length) for window in config.windows)
    return seen * 2 * config.num_kv_heads * head_dim(config) * kept


def read_bandwidth(device: torch.device, *, threads: int) -> float:
    """Measure the memory's read bandwidth in bytes per second, the best of two seconds."""
    if device.type == "cuda":
        numbers = torch.ones(GPU_PROBE_BYTES // 4, device=device)

        def read() -> None:
            numbers.sum()
            torch.cuda.synchronize(device)

        torch.cuda.synchronize(device)
        return GPU_PROBE_BYTES / _shortest(read)
    # On large pages, as the weights are: on small ones reading is at least a third slower.
    pieces = Arena().zeros((PROBE_BYTES // 4,), torch.float32).fill_(1).tensor_split(threads)
    with ThreadPoolExecutor(threads) as pool:
        return PROBE_BYTES / _shortest(
            lambda: list(pool.map(lambda piece: torch.dot(piece, piece), pieces))
        )


def _shortest(work: Callable[[], object]) -> float:
    """Return the shortest time of `work` in seconds, repeated for PROBE_SECONDS and at least once.

    The shortest and not the mean: other processes can only slow it down.
    """
    best = float("inf")
    until = time.perf_counter() + PROBE_SECONDS
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
