"""RL's rollouts: `python bench/rl.py`, beside nanochat's loop where NANOCHAT_DIR is its checkout.

Both sides answer the same prompts with the same weights, in one process, in turns. Ours puts the
whole step's answers in flight; the peer's loop is that of its scripts/chat_rl.py: one prompt after
another, its engine's `generate_batch` with so many samples at a time. Of a random model no answer
ever ends: those are the even lengths. For the ragged ones a direction that every hidden state
shares, and the end token's row along it, make an answer end with about `--end-chance` at each
token; where the draws fall differs, so answers are many and rates are per token. Tokens are those
of answers, without their end. Both sides compute in fp32 on a CPU and in bf16 on a GPU, unless
--precision (ours) or NANOCHAT_DTYPE (the peer's) says otherwise. On a busy machine believe the
ratio of CPU seconds; on a GPU (--device cuda) that of the clock. Not run on a GPU yet.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nanochat_core import scaling
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.speed import wait_for_gpu
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

VOCAB = 32768
PEER_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
TOP_K = 50
SHARED = 2.0  # of every embedding along one direction, over what is random in it
SINGLE, PAIRS = 256, VOCAB - 256 - len(SPECIAL_TOKENS)

Run = Callable[[int], int]  # round -> tokens of all answers


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--peer-batch", type=int, default=8, help="nanochat's device_batch_size")
    parser.add_argument("--even-tokens", type=int, default=64)
    parser.add_argument("--ragged-tokens", type=int, default=256, help="at most")
    parser.add_argument("--end-chance", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="model", help="our weights': model, bf16 or int8")
    parser.add_argument(
        "--cases", nargs="+", choices=("even", "ragged"), default=("even", "ragged")
    )
    parser.add_argument("--at-least", type=float, help="exit 1 when a ratio is smaller")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("NANOCHAT_DIR is not set: there is no peer to compare with", file=sys.stderr)
    else:  # before the peer is imported
        os.environ.setdefault("NANOCHAT_DTYPE", PEER_DTYPE[options.device])
    settings = {name: value for name, value in vars(options).items() if value is not None}
    found: dict[str, Any] = {
        "settings": settings,
        "torch": torch.__version__,
        "peer_dtype": os.environ.get("NANOCHAT_DTYPE"),
    }
    for case in options.cases:
        found[case] = measure(options, case, checkout)
        for name, of in found[case].items():
            print(f"{case}, {name}: {of}")
    print(json.dumps(found))
    ratio = "ratio_tokens_per_cpu_second" if options.device == "cpu" else "ratio_tokens_per_second"
    ratios = [found[case].get(ratio, math.inf) for case in options.cases]
    if options.at_least is not None and min(ratios) < options.at_least:
        sys.exit(1)


def measure(options: argparse.Namespace, case: str, checkout: str | None) -> dict[str, Any]:
    """Rates of both sides on one kind of lengths, medians over the rounds."""
    tokenizer = make_tokenizer()
    chance = options.end_chance if case == "ragged" else None
    model = make_model(options.depth, tokenizer, chance, torch.device(options.device))
    prompts = make_prompts(options.prompts, tokenizer)
    tokens = options.ragged_tokens if case == "ragged" else options.even_tokens
    sides = {"ours": ours(model, tokenizer, prompts, options, tokens)}
    if checkout is not None:
        sides["peer"] = peer(model, tokenizer, prompts, options, tokens, Path(checkout))
    rows = options.prompts * options.samples
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, run in sides.items():
            wait_for_gpu()
            wall, cpu = time.perf_counter(), time.process_time()
            made = run(number)
            wait_for_gpu()
            seconds = time.perf_counter() - wall
            rate = {
                "tokens_per_second": made / seconds,
                "tokens_per_cpu_second": made / (time.process_time() - cpu),
                "answers_per_second": rows / seconds,
                "answer_tokens": made / rows,
            }
            if number:  # the first round warms up
                rates[name].append(rate)
            print(f"{case} {name} {number} {seconds:.1f} s {rate}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {name: medians(of) for name, of in rates.items()}
    if checkout is not None:
        for unit in ("tokens_per_second", "tokens_per_cpu_second"):
            pairs = zip(rates["ours"], rates["peer"], strict=True)
            found[f"ratio_{unit}"] = statistics.median(a[unit] / b[unit] for a, b in pairs)
    return found


def medians(rates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every number."""
    return {name: round(statistics.median(r[name] for r in rates), 2) for name in rates[0]}


def make_tokenizer() -> Tokenizer:
    """As many ids as nanochat's: the bytes, pairs of them, and the special tokens."""
    ranks = {bytes([i]): i for i in range(SINGLE)}
    ranks |= {bytes(divmod(i, SINGLE)): SINGLE + i for i in range(PAIRS)}
    return Tokenizer(ranks)


def make_model(
    depth: int, tokenizer: Tokenizer, end_chance: float | None, device: torch.device
) -> GPT:
    """Random weights, of which an answer ends with `end_chance` at each token; None: never."""
    config = scaling.model_for_depth(depth, vocab_size=VOCAB)
    model = GPT(config, scaling.numerics("bf16" if device.type == "cuda" else "fp32"))
    model.init_weights(1)
    direction = torch.full((config.width,), config.width**-0.5)
    with torch.no_grad():
        # No block adds anything yet, so each hidden state keeps this part of its embedding.
        table, head = model.transformer.wte.weight, model.lm_head.weight
        scale = SHARED * model.numerics.init_embedding_std * math.sqrt(config.width)
        table.add_(scale * direction)
        along = math.sqrt(config.width) * SHARED / math.sqrt(1 + SHARED**2)
        head[tokenizer.bos :] = -direction  # special tokens never come
        if end_chance is not None:
            # Against the other candidates, whose logits are some 3 of their deviations above 0.
            others = 3 * 0.001 * math.sqrt(config.width)
            logit = others + math.log(end_chance / (1 - end_chance) * (TOP_K - 1))
            head[tokenizer.special("<|assistant_end|>")] = logit / along * direction
    return model.eval().to(device)


def make_prompts(count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Ordinary ids, as many as a word problem has, between <|bos|> and where an answer begins."""
    rng = random.Random(1)
    start = tokenizer.special("<|assistant_start|>")
    return [
        [tokenizer.bos, *rng.choices(range(tokenizer.bos), k=rng.randint(60, 160)), start]
        for _ in range(count)
    ]


def ours(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    options: argparse.Namespace,
    tokens: int,
) -> Run:
    """The engine's `complete`, as train/rl.py calls it: each round takes the weights over anew."""
    engine = Engine(model, tokenizer, precision=options.precision)

    def run(number: int) -> int:
        began = time.perf_counter()
        engine.refresh()
        wait_for_gpu()
        print(f"refresh: {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)
        groups = engine.complete(
            prompts,
            num_samples=options.samples,
            max_tokens=tokens,
            temperature=1.0,
            top_k=TOP_K,
            seeds=[1000 * number + i for i in range(len(prompts))],
        )
        return sum(len(answer.ids) for group in groups for answer in group)

    return run


class PeerTokens:
    """Our tokenizer by the names that the peer's engine calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode_special = tokenizer.special
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self.get_bos_token_id = lambda: tokenizer.bos


def peer(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    options: argparse.Namespace,
    tokens: int,
    checkout: Path,
) -> Run:
    """The loop of its scripts/chat_rl.py, on the same weights."""
    sys.path.insert(0, str(checkout))
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
    theirs.to_empty(device=options.device)
    theirs.init_weights()  # tables that are no parameters
    theirs.load_state_dict(model.state_dict())
    theirs.eval()
    check_same(model, theirs, prompts[0])
    engine = PeerEngine(theirs, PeerTokens(tokenizer))

    def run(number: int) -> int:
        made = 0
        for i, prompt in enumerate(prompts):
            for first in range(0, options.samples, options.peer_batch):
                answers, _ = engine.generate_batch(
                    prompt,
                    num_samples=min(options.peer_batch, options.samples - first),
                    max_tokens=tokens,
                    temperature=1.0,
                    top_k=TOP_K,
                    seed=(1000 * number + i) * options.samples + first,
                )
                made += sum(len(answer) - len(prompt) for answer in answers)
        return made

    return run


@torch.no_grad()
def check_same(model: GPT, theirs: Any, prompt: list[int]) -> None:
    """Both compute the same logits."""
    tokens = torch.tensor([prompt], device=model.lm_head.weight.device)
    bound = 1e-4 if model.dtype == torch.float32 else 0.1
    torch.testing.assert_close(model(tokens), theirs(tokens).float(), rtol=bound, atol=bound)


if __name__ == "__main__":
    main()
