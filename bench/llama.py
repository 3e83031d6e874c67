"""How fast answers come, next to llama.cpp's at the same shape.

    python bench/llama.py [--depths 4 12] [--batch-sizes 1 32] [--rounds 3] [--threads 1]

Random weights. llama.cpp runs a llama of our depth, width, heads and vocabulary, whose gated MLP is
2/3 as wide as ours and so has as many parameters; it differs in what a model of ours has besides
products. Prompts of 64 tokens, read anew each time, and answers of 32. Both sides are in one
process and take turns; seconds are of its CPU. The time of a step is that of a whole answer less
that of its first token, which is shown for one answer alone: of several to one prompt ours reads
the prompt once, and llama.cpp's server each time. Without the packages `xllamacpp` (llama.cpp's
server, prebuilt: its line says for which instructions) and `gguf` the script skips itself.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.infer import make_model, ours
from nanochat_core.config import ModelConfig
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.versions import processor_name

PROMPT, TOKENS = 64, 32
PRECISIONS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}  # ours, and llama.cpp's of its size
BLOCK = 32  # numbers that Q8_0 scales together


def main() -> int:
    """Measure every case and print a table, and a line of JSON."""
    parser = argparse.ArgumentParser(description="Answers next to llama.cpp's.")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    missing = [name for name in ("xllamacpp", "gguf") if find_spec(name) is None]
    if missing:
        print(f"bench llama is skipped: {' and '.join(missing)} not installed")
        return 0
    import xllamacpp  # pyright: ignore[reportMissingImports] - of no package of ours

    torch.set_num_threads(options.threads)
    print(f"{processor_name()}; llama.cpp: {xllamacpp.get_system_info()}")
    rows: list[dict[str, Any]] = []
    for depth in options.depths:
        for batch in options.batch_sizes:
            for row in compare(depth, batch, options.rounds, options.threads):
                rows.append({"depth": depth, "batch": batch} | row)
                print(describe(rows[-1]), flush=True)
    print(json.dumps({"bench": "llama", "processor": processor_name(), "rows": rows}))
    return 0


def compare(depth: int, batch: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Return a row for each precision: medians of both sides by CPU seconds."""
    model = make_model(depth, torch.device("cpu"))
    rng = random.Random(1)
    prompt = [rng.randrange(256, model.config.vocab_size) for _ in range(PROMPT)]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for precision, kind in PRECISIONS.items():
            settings = {
                **{"runner": "native", "precision": precision, "threads": threads},
                **{"num_slots": batch, "max_len": PROMPT + TOKENS},
            }
            try:
                own = ours(model, prompt, batch, TOKENS, settings)
            except ConfigError as error:
                print(f"{precision} is left out: {error}")
                continue
            path = Path(directory) / f"{precision}.gguf"
            write_llama(path, model.config, kind)
            theirs = peer(path, prompt, batch, threads)
            path.unlink()
            times: dict[str, list[float]] = {
                n: [] for n in ("own_first", "own_rest", "first", "rest")
            }
            for number in range(rounds + 1):
                timed, other = own(number), theirs()
                if number:  # the first round warms up
                    one = (timed.first_cpu, timed.rest_cpu, *other)
                    for name, seconds in zip(times, one, strict=True):
                        times[name].append(seconds)
            found.append({"precision": precision, "llama": kind} | summarise(times, batch))
    return found


def summarise(times: dict[str, list[float]], batch: int) -> dict[str, Any]:
    """Return what a row has of the CPU seconds of all rounds."""
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "tokens_per_cpu_second": batch * (TOKENS - 1) / middle["own_rest"],
        "llama_tokens_per_cpu_second": batch * (TOKENS - 1) / middle["rest"],
        "first_ms": 1e3 * middle["own_first"],
        "llama_first_ms": 1e3 * middle["first"],
    }


def peer(
    path: Path, prompt: list[int], batch: int, threads: int
) -> Callable[[], tuple[float, float]]:
    """Return a function that lets llama.cpp answer and returns the CPU seconds to the first token
    of every answer, and of the rest."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = batch
    params.n_ctx = batch * 2 * (PROMPT + TOKENS)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(batch)

    def answer(count: int) -> float:
        request = {
            **{"prompt": prompt, "n_predict": count, "temperature": 1.0, "top_k": 50},
            **{"ignore_eos": True, "cache_prompt": False, "seed": 1},
        }
        began = time.process_time()
        for result in pool.map(lambda _: server.handle_completions(dict(request)), range(batch)):
            assert result["usage"]["completion_tokens"] == count, result
        return time.process_time() - began

    def run() -> tuple[float, float]:
        first = answer(1)
        return first, answer(TOKENS) - first

    return run


def write_llama(path: Path, config: ModelConfig, kind: str) -> None:
    """Write a llama of random weights: our depth, width, heads and vocabulary."""
    import gguf  # pyright: ignore[reportMissingImports]

    width, hidden = config.width, round(8 * config.width / 3 / BLOCK) * BLOCK
    kv_width = width // config.num_heads * config.num_kv_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.sequence_len)
    writer.add_embedding_length(width)
    writer.add_block_count(config.depth)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")  # of bytes, and words that no prompt has
    kinds = gguf.TokenType
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    words = [f"w{i}" for i in range(config.vocab_size - 256)]
    writer.add_token_list(bytes_of + words)
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([kinds.BYTE] * 256 + [kinds.NORMAL] * len(words))
    dtype = getattr(gguf.GGMLQuantizationType, kind)
    rng = np.random.default_rng(1)

    def matrix(name: str, num_out: int, num_in: int) -> None:
        values = rng.standard_normal((num_out, num_in), dtype=np.float32) * 0.02
        packed = values if kind == "F32" else gguf.quants.quantize(values, dtype)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=dtype)

    matrix("token_embd", config.vocab_size, width)
    matrix("output", config.vocab_size, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(config.depth):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
        for name, num_out, num_in in (
            *(("attn_q", width, width), ("attn_k", kv_width, width), ("attn_v", kv_width, width)),
            *(("attn_output", width, width), ("ffn_gate", hidden, width)),
            *(("ffn_up", hidden, width), ("ffn_down", width, hidden)),
        ):
            matrix(f"blk.{i}.{name}", num_out, num_in)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    own, other = row["tokens_per_cpu_second"], row["llama_tokens_per_cpu_second"]
    line = (
        f"d{row['depth']:<3} {row['batch']:>3} at a time, {row['precision']:<4} {own:>8,.0f} "
        f"tokens per CPU second, llama.cpp in {row['llama']:<4} {other:>8,.0f} ({own / other:.2f}x)"
    )
    if row["batch"] > 1:
        return line
    own, other = row["first_ms"], row["llama_first_ms"]
    return f"{line}; first token after {own:,.1f} and {other:,.1f} CPU ms ({other / own:.2f}x)"


if __name__ == "__main__":
    sys.exit(main())
