"""How fast answers come, beside nanochat's Engine on the same weights and prompts.

    NANOCHAT_DIR=/path/to/nanochat python bench/infer.py [--depths 4 12] [--batch-sizes 1 8 32]
        [--prompts 64 512] [--sides native:fp32 native:bf16 amx:bf16 native:int8 amx:int8 ...]
        [--rounds 3] [--tokens 32] [--threads 1] [--at-least RATIO]
    NANOCHAT_DIR=/path/to/nanochat python bench/infer.py --device cuda [--sides graphs:bf16]

Random weights, drawn answers of a fixed length (top-k 50), all sides in one process and in turn:
what else runs on the machine slows all of them. Ours go through the scheduler, the peer's through
`Engine.generate` in the precision that NANOCHAT_DTYPE says (unless it is set, fp32 on a CPU and
bf16 on a GPU). A ratio is the median over rounds of the peer's time over ours, in CPU seconds and
by the clock; times are the best. Exit 1: a side of ours had fewer than --at-least times the peer's
tokens per second, of the CPU, or by the clock on a GPU.

The share of the bandwidth is of what reading measures here: a step reads all matrices, and the keys
and values its rows see; no embeddings. Above 1 means that a cache holds the model.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from nanochat_core import scaling
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.choose import choose_runner, open_runner
from nanochat_core.engine.speed import (
    bytes_per_step,
    make_endless,
    read_bandwidth,
    time_answers,
    wait_for_gpu,
)
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT

SIDES = {
    "cpu": (
        *("native:fp32", "native:bf16", "native:int8", "amx:bf16", "amx:int8"),
        *("torch:fp32", "torch:bf16"),
    ),
    "cuda": ("graphs:bf16", "triton:bf16", "torch:bf16"),
}
RUNNERS = {name: name for name in ("native", "amx", "torch", "triton")} | {"graphs": "cuda graphs"}
PEER_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
EVALUATED = {"cpu": "ratio_rest_cpu", "cuda": "ratio_rest"}
TOP_K = 50
NO_TOKEN = 10**9
PEER = "nanochat"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One round of one side, in seconds by the clock and of the CPU."""

    first: float  # to the first token of every answer
    rest: float  # from there to the last
    first_cpu: float
    rest_cpu: float


# (round) -> what it took
Side: TypeAlias = Callable[[int], Timed]


def main() -> int:
    """Measure every case, print a table and a line of JSON; 1 where a ratio is too small."""
    parser = argparse.ArgumentParser(description="Answers beside nanochat's Engine.")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="their lengths")
    parser.add_argument(
        "--sides", nargs="+", choices=sorted({s for of in SIDES.values() for s in of})
    )
    parser.add_argument("--device", choices=sorted(SIDES), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-least", type=float, help="exit 1 when a ratio is smaller")
    options = parser.parse_args()
    options.sides = options.sides or SIDES[options.device]
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench infer is skipped: --device cuda, and torch sees no GPU")
        return 0
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("bench infer is skipped: NANOCHAT_DIR names no checkout of nanochat")
        return 0
    os.environ.setdefault(
        "NANOCHAT_DTYPE", PEER_DTYPE[options.device]
    )  # before the peer is imported
    sys.path.insert(0, checkout)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    bandwidth = read_bandwidth(device, threads=options.threads)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"reading gets {bandwidth / 1e9:.1f} GB/s on {name}, {options.threads} threads")
    found: list[dict[str, Any]] = []
    for depth in options.depths:
        model = make_model(depth, device)
        for prompt_len in options.prompts:
            for batch in options.batch_sizes:
                case = {"depth": depth, "prompt": prompt_len, "batch": batch}
                for row in compare(model, prompt_len, batch, bandwidth, options):
                    found.append(case | row)
                    print(describe(found[-1]), flush=True)
    print(
        json.dumps(
            {
                "bench": "infer",
                "device": name,
                "threads": options.threads,
                "peer_dtype": os.environ["NANOCHAT_DTYPE"],
                "bandwidth": bandwidth,
                "rows": found,
            }
        )
    )
    failures = find_failures(found, field=EVALUATED[options.device], at_least=options.at_least)
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


def find_failures(
    rows: Sequence[dict[str, Any]], *, field: str, at_least: float | None
) -> list[str]:
    """A line for each row of ours whose ratio is too small, and one where there is none."""
    if at_least is None:
        return []
    ours = [row for row in rows if row["side"] != PEER]
    if not ours:
        return ["no side was measured"]
    return [
        f"d{row['depth']} batch {row['batch']} prompt {row['prompt']}: {row['side']} is "
        f"{row[field]:.2f} times the peer, {at_least} is wanted"
        for row in ours
        if row[field] < at_least
    ]


def make_model(depth: int, device: torch.device) -> GPT:
    """Random weights, all of which matter; in bf16 on a GPU, as the peer's."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    model = GPT(scaling.model_for_depth(depth), scaling.numerics(precision))
    model.init_weights(1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight") or name == "lm_head.weight":
                parameter.normal_(std=0.02, generator=generator)
    return model.eval().to(device)


def compare(
    model: GPT, prompt_len: int, batch: int, bandwidth: float, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The peer's row, then a row for each side that can run here."""
    rng = random.Random(1)
    prompt = [rng.randrange(model.config.vocab_size) for _ in range(prompt_len)]
    sides: dict[str, Side] = {PEER: peer(model, prompt, batch, options.tokens)}
    reads: dict[str, int] = {}
    for name in options.sides:
        runner, _, precision = name.partition(":")
        settings: dict[str, Any] = {
            "runner": RUNNERS[runner],
            "precision": precision,
            "num_slots": batch,
            "max_len": prompt_len + options.tokens,
            "threads": options.threads,
        }
        try:
            choice = choose_runner(model, **settings)
            sides[name] = ours(model, prompt, batch, options.tokens, settings)
        except ConfigError as error:
            print(f"{name} is left out: {error}")
            continue
        length = prompt_len + options.tokens // 2
        reads[name] = bytes_per_step(
            model, choice.runner, choice.precision, rows=batch, length=length
        )
    rounds: dict[str, list[Timed]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, side in sides.items():
            timed = side(number)
            if number:  # the first round warms up
                rounds[name].append(timed)
    steps = options.tokens - 1
    for name, of in rounds.items():
        step = min(one.rest for one in of) / steps
        row: dict[str, Any] = {
            "side": name,
            "first_ms": 1e3 * min(one.first for one in of),
            "step_ms": 1e3 * step,
            "tokens_per_second": batch / step,
        }
        if name in reads:
            row["bandwidth_share"] = reads[name] / step / bandwidth
        for field in ("first", "rest", "first_cpu", "rest_cpu"):
            row[f"ratio_{field}"] = statistics.median(
                asdict(theirs)[field] / asdict(own)[field]
                for theirs, own in zip(rounds[PEER], of, strict=True)
            )
        yield row


def ours(model: GPT, prompt: list[int], batch: int, tokens: int, settings: dict[str, Any]) -> Side:
    """The scheduler on one of our runners."""
    runner = open_runner(model, stop_tokens=(), **settings)
    scheduler = make_endless(runner, context=settings["max_len"])

    def run(number: int) -> Timed:
        scheduler.forget()  # or the prompt is found, and not read
        cpu = time.process_time()
        reached: list[float] = []
        first, rest = time_answers(
            scheduler,
            prompt,
            batch,
            tokens,
            seed=number,
            params=SamplingParams(top_k=TOP_K),
            on_first=lambda: reached.append(time.process_time()),
        )
        return Timed(
            first=first,
            rest=rest,
            first_cpu=reached[0] - cpu,
            rest_cpu=time.process_time() - reached[0],
        )

    return run


class PeerTokens:
    """A tokenizer none of whose special tokens ever comes, so that no answer ends early."""

    def encode_special(self, name: str) -> int:
        """No token."""
        return NO_TOKEN

    def get_bos_token_id(self) -> int:
        """No token."""
        return NO_TOKEN


def peer(model: GPT, prompt: list[int], batch: int, tokens: int) -> Side:
    """nanochat's engine on the same weights."""
    # A checkout is not a package of ours: nothing can be said of its types.
    from nanochat.engine import Engine as PeerEngine  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPT as PeerGPT  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPTConfig  # pyright: ignore[reportMissingImports]

    c = model.config
    with torch.device("meta"):
        theirs = PeerGPT(
            GPTConfig(
                sequence_len=c.sequence_len,
                vocab_size=c.vocab_size,
                n_layer=c.depth,
                n_head=c.num_heads,
                n_kv_head=c.num_kv_heads,
                n_embd=c.width,
            )
        )
    theirs.to_empty(device=model.lm_head.weight.device)
    theirs.init_weights()  # tables that are no parameters
    theirs.load_state_dict(model.state_dict())
    theirs.eval()
    engine = PeerEngine(theirs, PeerTokens())

    def run(number: int) -> Timed:
        wait_for_gpu()
        began, cpu = time.perf_counter(), time.process_time()
        columns = engine.generate(
            prompt,
            num_samples=batch,
            max_tokens=tokens,
            temperature=1.0,
            top_k=TOP_K,
            seed=number,
        )
        next(columns)
        first, first_cpu = time.perf_counter(), time.process_time()
        advance(columns, tokens - 1)
        wait_for_gpu()
        return Timed(
            first=first - began,
            rest=time.perf_counter() - first,
            first_cpu=first_cpu - cpu,
            rest_cpu=time.process_time() - first_cpu,
        )

    return run


def advance(columns: Iterator[object], count: int) -> None:
    """Take `count` columns and not the end: up to that the peer computes a pass for nothing."""
    for _ in range(count):
        next(columns)


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    share = f", {row['bandwidth_share']:.0%} of the bandwidth" if "bandwidth_share" in row else ""
    return (
        f"d{row['depth']:<3} batch {row['batch']:<3} prompt {row['prompt']:<4} {row['side']:<12}"
        f"{row['tokens_per_second']:>9,.0f} tokens/s ({row['ratio_rest_cpu']:.2f}x; "
        f"{row['ratio_rest']:.2f}x by the clock), first after {row['first_ms']:,.1f} ms "
        f"({row['ratio_first_cpu']:.2f}x; {row['ratio_first']:.2f}x){share}"
    )


if __name__ == "__main__":
    sys.exit(main())
