"""Compare what we and nanochat learn: bits per byte of both after the same training.

    NANOCHAT_DIR=/path/to/nanochat python bench/parity.py [--seeds 1 2] [--steps 300]

Both sides get the same text (docstrings of the packages installed here, in another order for each
seed), the same tokenizer, depth, batch and number of steps, in fp32 on the CPU (--device cuda: not
run yet), in the same run: ours is the stage `pretrain` as the product runs it, the peer's its own
scripts/base_train.py, unchanged, with its schedule, on our rows in our order. `--data own` leaves
it its own loader. Then each should read most of the text, or the difference is one draw of a few
percent of it: `--documents` takes so many of each seed's order, and `--buffer` is the number of
documents from which both packers choose, which must be small beside that (nanochat's own, 1000,
would read the text again before it ends). `--same-start` gives nanochat our initial weights, for
pairs that differ in the data alone. Both models are scored by one evaluator on the same held-out
text, packed by us (all of it) and by nanochat (beginnings). Printed last, for each packing: the
difference in percent, mean over the seeds with its 95 % interval. Exit 1: ours is worse by more
than --tolerance on average over the seeds on all of the text, in any precision.
"""

import argparse
import importlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
from nanochat_core.data.row_files import INDEX_FILE, Rows
from nanochat_core.data.shard_files import (
    ShardFile,
    ShardSet,
    read_batches,
    shard_name,
    write_shard,
)
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.evaluate.intervals import mean_over_seeds
from nanochat_core.job import Job, Resources
from nanochat_core.model.checkpoint import load_model
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is started by its path

from bench.package_text import package_text, small_text

TOLERANCE = 0.003
LAST_LINES = 15  # of a peer that failed, to print
VOCAB, SEQUENCE_LEN = 4096, 512
EVAL_TOKENS = 100_000
PACKINGS = {"default": "rows", "nanochat": "nanochat"}  # policy -> its rows among what is made
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
    parser.add_argument("--rows", type=int, default=4, help="rows in a step")
    parser.add_argument("--sequence-len", type=int, default=SEQUENCE_LEN)
    parser.add_argument("--text", type=Path, help="keep text and tokenizer here for other calls")
    parser.add_argument("--small-text", action="store_true", help="docs/ as text: for a dry run")
    parser.add_argument("--documents", type=int, help="of the text; all of them if left out")
    parser.add_argument("--document-chars", type=int, help="longer documents are cut into several")
    parser.add_argument("--eval-tokens", type=int, default=EVAL_TOKENS)
    parser.add_argument("--buffer", type=int, default=1000, help="documents to pack from")
    parser.add_argument("--same-start", action="store_true", help="our initial weights for both")
    parser.add_argument("--data", choices=("own", "rows"), default="rows", help="of the peer")
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("parity is skipped: NANOCHAT_DIR names no checkout of nanochat")
        return
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-parity-") as directory:
        text_of = small_text if options.small_text else package_text
        run = run_config(options, options.sequence_len, text=text_of(Path(directory) / "source"))
        run = replace(run, rows=replace(run.rows, buffer_documents=options.buffer))
        batch = run.pretrain.total_batch_size
        print(f"{options.steps} steps of {batch} tokens, depth {options.depth}")
        text = prepare_text(run, options.text or Path(directory) / "text")
        for seed in options.seeds:
            home, of_seed = Path(directory) / f"seed-{seed}", replace(run, seed=seed)
            made = prepare(of_seed, text, home / "data", options.documents, options.document_chars)
            found.append({"seed": seed} | train_both(of_seed, made, home, Path(checkout), options))
            print(f"seed {seed}: " + describe(found[-1]), flush=True)
    worst = -math.inf
    for precision in options.precisions:
        for packing in PACKINGS:
            excess = mean_over_seeds(
                [one["ours"][precision][packing] / one["peer"][packing] - 1 for one in found]
            )
            if packing == "default":
                worst = max(worst, excess.value)
            spread = f"{excess.low:+.3%} to {excess.high:+.3%}"
            spread = "one seed, no interval" if math.isinf(excess.low) else spread
            print(
                f"validation text packed by {packing}: ours in {precision} / peer - 1 over "
                f"{len(found)} seeds: {excess.value:+.3%} ({spread})"
            )
    print(f"at most {options.tolerance:.1%} wanted on default")
    tree = {"seeds": found, "excess": worst}
    print(json.dumps(tree))
    if options.json:
        options.json.write_text(json.dumps(tree, indent=1))
    sys.exit(1 if worst > options.tolerance else 0)


def describe(one: dict[str, Any]) -> str:
    """One seed's figures."""
    peer, kept = one["peer"], one["kept"]
    ours = ", ".join(
        f"{bpb['default']:.4f} ours in {precision} ({bpb['default'] / peer['default'] - 1:+.2%}; "
        f"{bpb['nanochat'] / peer['nanochat'] - 1:+.2%} on nanochat's packing)"
        for precision, bpb in one["ours"].items()
    )
    return (
        f"bits per byte {ours}, {peer['default']:.4f} peer; of the text ours reads "
        f"{kept['default']:.1%}, nanochat's loader {kept['nanochat']:.1%}; {one['seconds']:.0f} s"
    )


def run_config(
    options: argparse.Namespace, sequence_len: int = SEQUENCE_LEN, *, text: Sequence[str] = ()
) -> RunConfig:
    """Return nanochat's rules for batch and steps of the peer; `text` has settings of another."""
    shape: dict[str, Any] = {"sequence_len": sequence_len, "vocab_size": VOCAB}
    run = scaling.run_for_depth(options.depth, precision="fp32", **shape)
    reference = scaling.run_for_depth(scaling.REFERENCE_DEPTH, precision="fp32", **shape)
    horizons = [int(12 * scaling.num_scaling_params(r.model, r.numerics)) for r in (run, reference)]
    batch = options.rows * sequence_len
    tiny = open_profile("tiny", overrides=text).run
    return replace(
        run,
        shards=tiny.shards,
        task_data=run.task_data,
        tokenizer=replace(tiny.tokenizer, vocab_size=VOCAB),
        optimizer=scaling.optimizer_for(
            run.model, tokens=horizons[0], reference_tokens=horizons[1], total_batch_size=batch
        ),
        pretrain=replace(
            run.pretrain, num_steps=options.steps, total_batch_size=batch, eval_tokens=sequence_len
        ),
    )


def prepare_text(run: RunConfig, directory: Path) -> dict[str, Path]:
    """Stages shards and tokenizer: stage -> its files, the same for every seed.

    What an earlier call has made in `directory` is taken as it is.
    """
    made: dict[str, Path] = {}
    for name in ("shards", "tokenizer"):
        there = directory / name / "output"
        done = (there / f"{name}.json").exists()  # which comes last
        made[name] = there if done else run_stage(name, run, directory / name, made)
    return made


def prepare(
    run: RunConfig,
    text: dict[str, Path],
    directory: Path,
    documents: int | None = None,
    document_chars: int | None = None,
) -> dict[str, Path]:
    """Stages tokens and rows of documents in the seed's order: stage -> its files.

    "rows" are packed by the run's policy, "nanochat" by nanochat's. Documents longer than
    `document_chars` are cut into several first. Of those for training the first `documents` are
    taken; the validation text is all of it.
    """
    made = text | {"shards": directory / "shards"}
    made["shards"].mkdir(parents=True)
    sources = ShardSet.open(text["shards"])
    shards: list[ShardFile] = []
    for number, paths in enumerate((sources.train, (sources.validation,))):
        texts = [
            piece
            for path in paths
            for group in read_batches(path)
            for one in group
            for piece in pieces(one, document_chars or len(one))
        ]
        random.Random(run.seed * (1 - number)).shuffle(texts)
        taken = texts if number else texts[:documents]
        path = made["shards"] / shard_name(number)
        shards.append(write_shard(path, taken, scratch=directory))
    ShardSet(directory=made["shards"], shards=tuple(shards)).write()
    made["tokens"] = run_stage("tokens", run, directory / "tokens", made)
    made["rows"] = run_stage("rows", run, directory / "rows", made)
    theirs = replace(run, rows=replace(run.rows, policy="nanochat"))
    made["nanochat"] = run_stage("rows", theirs, directory / "nanochat", made)
    return made


def pieces(text: str, size: int) -> list[str]:
    """Cut a text into pieces of at most `size` characters; those that are blank are left out."""
    cut = (text[start : start + size] for start in range(0, len(text), size))
    return [piece for piece in cut if piece.strip()]


def run_stage(name: str, run: RunConfig, directory: Path, made: dict[str, Path]) -> Path:
    """Run a stage in this process; the directory of its files."""
    inputs = {stage.name: made[stage.name] for stage in stage_named(name).inputs}
    job = make_job(name, run, directory, inputs, device="cpu", threads=1)
    importlib.import_module(job.entry).run(job)
    return job.output


def kept(rows: Path, number: int) -> float:
    """The share of the training text in the first `number` rows, in any order of them."""
    tree = json.loads((rows / INDEX_FILE).read_text(encoding="utf-8"))
    return (1 - tree["waste"]) * min(1.0, number / tree["num_train"])


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
            device_batch_size=run.pretrain.total_batch_size // run.model.sequence_len,
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
    """Train one after the other; bits per byte of both, and of the text the share they read."""
    began = time.monotonic()
    inputs = {name: made[name] for name in ("rows", "tokenizer")}
    device = torch.device(options.device)
    ours: dict[str, dict[str, float]] = {}
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
        ours[precision] = evaluate(load_model(job.output, device), made, options.eval_tokens)
    if code := run_peer(run, made, home / "peer", checkout, options):
        log = (home / "peer" / "log").read_text().splitlines()
        lines = [line for line in log if line.strip()]
        sys.exit("\n".join([f"the peer ended with {code}:", *lines[-LAST_LINES:]]))
    with device:
        theirs = GPT(run.model, scaling.numerics(options.precisions[0]))
    (weights,) = (home / "peer" / "base_checkpoints" / f"d{options.depth}").glob("model_*.pt")
    theirs.load_state_dict(torch.load(weights, map_location=device))
    return {
        "ours": ours,
        "peer": evaluate(theirs, made, options.eval_tokens),
        "kept": {
            name: kept(made[rows], options.steps * options.rows) for name, rows in PACKINGS.items()
        },
        "seconds": time.monotonic() - began,
    }


def evaluate(model: GPT, made: dict[str, Path], num_tokens: int = EVAL_TOKENS) -> dict[str, float]:
    """Bits per byte on held-out text in either packing, the same for both."""
    token_bytes = Tokenizer.load(made["tokenizer"]).token_bytes()
    found = {
        name: bits_per_byte(
            model,
            Rows.open(made[rows], "val"),
            token_bytes,
            num_tokens=num_tokens,
            batch_size=4,
            world=World(rank=0, local_rank=0, size=1),
        )
        for name, rows in PACKINGS.items()
    }
    assert all(map(math.isfinite, found.values())), found
    return found


def run_peer(
    run: RunConfig, made: dict[str, Path], home: Path, checkout: Path, options: argparse.Namespace
) -> int:
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
        "max-seq-len": run.model.sequence_len,
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
        "buffer": run.rows.buffer_documents,
    }
    if options.same_start:
        start = GPT(run.model, run.numerics)
        start.init_weights(run.seed)
        torch.save(start.state_dict(), home / "start.pt")
        tree["start"] = str(home / "start.pt")
    if options.data == "rows":
        np.save(home / "rows.npy", rows_in_order(run, made["rows"], options))
        tree["rows"] = str(home / "rows.npy")
    # Compiled or not, its arithmetic is the same; compiling takes minutes on a small machine.
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(home), "TORCHDYNAMO_DISABLE": "1"}
    with (home / "log").open("w") as log:
        return subprocess.call(
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
