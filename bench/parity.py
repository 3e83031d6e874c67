"""Compare what we and nanochat learn: bits per byte of both after the same training.

    NANOCHAT_DIR=/path/to/nanochat python bench/parity.py [--seeds 1 2] [--steps 300]

Both sides get the same text (docstrings of the packages installed here, in another order for each
seed), the same tokenizer, depth, batch and number of steps, in fp32 on the CPU (--device cuda, in
bf16 and fp8: not run there yet),
side by side in the same run: ours is the stage `pretrain` as the product runs it, the peer's its
own scripts/base_train.py, unchanged, with its initial weights and schedule, on our rows in our
order. `--data own` leaves it its own loader: then the two learn from different parts of the text in
so few steps, and the difference says as much of the text as of the training. Both models are scored
by one evaluator on the same held-out text. Printed last: the difference in percent, mean over the
seeds with its 95 % interval. Exit 1: ours is worse by more than --tolerance on average over the
seeds, in any precision.
"""

import argparse
import importlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from tiktoken.load import load_tiktoken_bpe

from flows.profiles import open_profile
from flows.stages import stage_named
from infra.launch.torchrun import run_job
from nanochat_core import scaling
from nanochat_core.config import RunConfig
from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.evaluate.intervals import mean_over_seeds
from nanochat_core.job import Job, Resources
from nanochat_core.model.checkpoint import load_model
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

TOLERANCE = 0.003
LAST_LINES = 15  # of a peer that failed, to print
VOCAB, SEQUENCE_LEN = 4096, 512
EVAL_TOKENS = 100_000
HERE = Path(__file__).resolve().parent


def main() -> None:
    """Train both for each seed, print a table."""
    parser = argparse.ArgumentParser(description="Whether we learn what nanochat learns.")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precisions", nargs="+", default=["fp32"], help="of ours")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4, help="rows of 512 tokens in a step")
    parser.add_argument("--data", choices=("own", "rows"), default="rows", help="of the peer")
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("parity is skipped: NANOCHAT_DIR names no checkout of nanochat")
        return
    run = run_config(options)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-parity-") as directory:
        batch = run.pretrain.total_batch_size
        print(f"{options.steps} steps of {batch} tokens, depth {options.depth}")
        for seed in options.seeds:
            home, of_seed = Path(directory) / f"seed-{seed}", replace(run, seed=seed)
            made = prepare(of_seed, home / "data")
            found.append({"seed": seed} | train_both(of_seed, made, home, Path(checkout), options))
            print(f"seed {seed}: " + describe(found[-1]), flush=True)
    worst = -math.inf
    for precision in options.precisions:
        excess = mean_over_seeds([one["ours"][precision] / one["peer"] - 1 for one in found])
        worst = max(worst, excess.value)
        spread = f"{excess.low:+.3%} to {excess.high:+.3%}"
        spread = "one seed, no interval" if math.isinf(excess.low) else spread
        print(
            f"ours in {precision} / peer - 1 over {len(found)} seeds: {excess.value:+.3%} "
            f"({spread}), at most {options.tolerance:.1%} wanted"
        )
    tree = {"seeds": found, "excess": worst}
    print(json.dumps(tree))
    if options.json:
        options.json.write_text(json.dumps(tree, indent=1))
    sys.exit(1 if worst > options.tolerance else 0)


def describe(one: dict[str, Any]) -> str:
    """One seed's figures."""
    ours = ", ".join(
        f"{bpb:.4f} ours in {precision} ({bpb / one['peer'] - 1:+.2%})"
        for precision, bpb in one["ours"].items()
    )
    return f"bits per byte {ours}, {one['peer']:.4f} peer; {one['seconds']:.0f} s"


def run_config(options: argparse.Namespace) -> RunConfig:
    """Return nanochat's rules for the batch and the steps of the peer."""
    shape: dict[str, Any] = {"sequence_len": SEQUENCE_LEN, "vocab_size": VOCAB}
    run = scaling.run_for_depth(options.depth, precision="fp32", **shape)
    reference = scaling.run_for_depth(scaling.REFERENCE_DEPTH, precision="fp32", **shape)
    horizons = [int(12 * scaling.num_scaling_params(r.model, r.numerics)) for r in (run, reference)]
    batch = options.rows * SEQUENCE_LEN
    tiny = open_profile("tiny").run
    return replace(
        run,
        shards=tiny.shards,
        task_data=run.task_data,
        tokenizer=replace(tiny.tokenizer, vocab_size=VOCAB),
        optimizer=scaling.optimizer_for(
            run.model, tokens=horizons[0], reference_tokens=horizons[1], total_batch_size=batch
        ),
        pretrain=replace(
            run.pretrain, num_steps=options.steps, total_batch_size=batch, eval_tokens=SEQUENCE_LEN
        ),
    )


def prepare(run: RunConfig, directory: Path) -> dict[str, Path]:
    """Stages shards to rows: stage -> its files."""
    made: dict[str, Path] = {}
    for name in ("shards", "tokenizer", "tokens", "rows"):
        inputs = {stage.name: made[stage.name] for stage in stage_named(name).inputs}
        job = make_job(name, run, directory / name, inputs, device="cpu", threads=1)
        importlib.import_module(job.entry).run(job)
        made[name] = job.output
    return made


def make_job(
    name: str,
    run: RunConfig,
    directory: Path,
    inputs: dict[str, Path],
    *,
    device: str,
    threads: int,
) -> Job:
    """A job of a stage with the sections it reads."""
    stage, tree = stage_named(name), run.tree()
    job = Job(
        directory=directory,
        stage=name,
        entry=stage.entry,
        fingerprint="bench",
        config={name: tree[name] for name in stage.config},
        inputs=inputs,
        resources=Resources(
            device=device,
            threads=threads,
            device_batch_size=run.pretrain.total_batch_size // SEQUENCE_LEN,
            save_every_seconds=1e9,
            eval_every_steps=0,
            dollars_per_hour=0.0,
        ),
    )
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    return job


def train_both(
    run: RunConfig, made: dict[str, Path], home: Path, checkout: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Train side by side; bits per byte of both."""
    began = time.monotonic()
    peer = start_peer(run, made, home / "peer", checkout, options)
    inputs = {name: made[name] for name in ("rows", "tokenizer")}
    device = torch.device(options.device)
    ours: dict[str, float] = {}
    try:
        for precision in options.precisions:
            numerics = scaling.numerics(precision)
            job = make_job(
                "pretrain",
                replace(run, numerics=numerics),
                home / precision,
                inputs,
                device=options.device,
                threads=options.threads,
            )
            run_job(job, processes=1, on_event=lambda event: None)
            ours[precision] = evaluate(load_model(job.output, device), made)
        code = peer.wait()
    finally:
        peer.kill()
    if code:
        log = (home / "peer" / "log").read_text().splitlines()
        lines = [line for line in log if line.strip()]
        sys.exit("\n".join([f"the peer ended with {code}:", *lines[-LAST_LINES:]]))
    with device:
        theirs = GPT(run.model, scaling.numerics(options.precisions[0]))
    (weights,) = (home / "peer" / "base_checkpoints" / f"d{options.depth}").glob("model_*.pt")
    theirs.load_state_dict(torch.load(weights, map_location=device))
    return {"ours": ours, "peer": evaluate(theirs, made), "seconds": time.monotonic() - began}


def evaluate(model: GPT, made: dict[str, Path]) -> float:
    """Bits per byte on held-out text, the same for both."""
    value = bits_per_byte(
        model,
        Rows.open(made["rows"], "val"),
        Tokenizer.load(made["tokenizer"]).token_bytes(),
        num_tokens=EVAL_TOKENS,
        batch_size=4,
        world=World(rank=0, local_rank=0, size=1),
    )
    assert math.isfinite(value), value
    return value


def start_peer(
    run: RunConfig, made: dict[str, Path], home: Path, checkout: Path, options: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """nanochat's script in a home where our shards and our tokenizer lie as it expects them."""
    (home / "tokenizer").mkdir(parents=True)
    (home / "base_data_climbmix").symlink_to(made["shards"])
    with (home / "tokenizer" / "tokenizer.pkl").open("wb") as file:
        pickle.dump(encoding(made["tokenizer"]), file)
    token_bytes = torch.from_numpy(Tokenizer.load(made["tokenizer"]).token_bytes())
    torch.save(token_bytes, home / "tokenizer" / "token_bytes.pt")
    arguments = {
        "device-type": options.device,
        "depth": options.depth,
        "max-seq-len": SEQUENCE_LEN,
        "device-batch-size": options.rows,
        "total-batch-size": run.pretrain.total_batch_size,
        "num-iterations": options.steps,
        "eval-every": -1,
        "core-metric-every": -1,
        "sample-every": -1,
    }
    tree = {
        "checkout": str(checkout.resolve()),
        "arguments": [f"--{name}={value}" for name, value in arguments.items()],
        "threads": options.threads,
        "seed": run.seed,
        "device": options.device,
    }
    if options.data == "rows":
        np.save(home / "rows.npy", rows_in_order(run, made["rows"], options))
        tree["rows"] = str(home / "rows.npy")
    # Compiled or not, its arithmetic is the same; compiling takes minutes on a small machine.
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(home), "TORCHDYNAMO_DISABLE": "1"}
    with (home / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "peer_train.py"), json.dumps(tree)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | {"OMP_NUM_THREADS": str(options.threads)},
        )


def rows_in_order(run: RunConfig, directory: Path, options: argparse.Namespace) -> np.ndarray:
    """The rows of every step (steps, B, T+1), as our training takes them."""
    rows = Rows.open(directory, "train")
    steps = range(options.steps)
    return np.stack([rows.take(rows.step_ids(s, options.rows, run.seed)) for s in steps])


def encoding(directory: Path) -> tiktoken.Encoding:
    """Our vocabulary as the encoding that nanochat's tokenizer wraps."""
    ranks = load_tiktoken_bpe(str(directory / "tokenizer.tiktoken"))
    settings = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    return tiktoken.Encoding(
        name="peer",
        pat_str=settings["pattern"],
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)},
    )


if __name__ == "__main__":
    main()
