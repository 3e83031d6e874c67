"""Compare the engine with the reference: `python -m nanochat_core.engine MODEL_DIR`.

Both answer one prompt, token by token. Prints the answer, the seconds that each took and whether
the tokens are equal. On a GPU, and in bf16, two likely tokens may be closer than the difference of
two orders of summation; in fp32 on a CPU the tokens are equal.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanochat_core.engine.answer import Completion
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.reference import generate_naive
from nanochat_core.engine.speed import wait_for_gpu
from nanochat_core.errors import ConfigError, NanochatError
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime.hardware.device import use_device
from nanochat_core.tokenizer.bpe import Tokenizer


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nanochat_core.engine",
        description="Compare the engine with the reference, and time both.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a model directory")
    parser.add_argument("--prompt", default="The chemical formula of water is")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runner", help="native, device or torch; default the best that works")
    return parser


def main(arguments: list[str]) -> int:
    """Run the comparison; return 0 if the tokens are equal, else 1."""
    options = make_parser().parse_args(arguments)
    try:
        return compare(options)
    except NanochatError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1


def compare(options: argparse.Namespace) -> int:
    """Answer with both, print, and return the exit code."""
    try:
        device = torch.device(options.device)
        use_device(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device {options.device} cannot be used here: {first}", hint="cpu, cuda or cuda:1"
        ) from error
    model = load_model(options.model, device)
    tokenizer = Tokenizer.load(options.model / "tokenizer")
    tokens = [tokenizer.bos, *tokenizer.encode(options.prompt)]
    engine = Engine(model, tokenizer, num_slots=1, runner=options.runner)
    settings = {"temperature": options.temperature}

    def reference(limit: int) -> Completion:
        return generate_naive(
            model, tokenizer, tokens, max_tokens=limit, seed=options.seed, **settings
        )

    def answer(limit: int) -> Completion:
        [[found]] = engine.complete(
            [tokens], num_samples=1, max_tokens=limit, top_k=None, seeds=[options.seed], **settings
        )
        return found

    expected = _time("reference", reference, options.max_tokens)
    found = _time("engine", answer, options.max_tokens)
    _print(options.prompt + tokenizer.decode(expected.ids))
    if found == expected:
        _print(f"equal: {len(expected.ids)} tokens")
        return 0
    pairs = enumerate(zip(expected.ids, found.ids, strict=False))
    length = min(len(expected.ids), len(found.ids))
    first = next((i for i, (one, other) in pairs if one != other), length)
    _print(f"different from token {first} on: {tokenizer.decode(found.ids[first:])}")
    return 1


def _time(name: str, answer: Callable[[int], Completion], limit: int) -> Completion:
    answer(1)  # what is opened and compiled once is not timed
    wait_for_gpu()
    began = time.perf_counter()
    completion = answer(limit)
    wait_for_gpu()
    seconds = time.perf_counter() - began
    _print(f"{name:9} {seconds:7.3f} s {len(completion.ids) / seconds:8,.0f} tokens/s")
    return completion


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
