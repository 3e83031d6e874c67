"""Compare what a training may differ in besides the model: bits per byte after each of `ARMS`.

    python -m bench.order [--seeds 1 2 3 4 5] [--depth 4] [--steps 300]

Every seed has an order of documents and initial weights of its own. From these documents come
rows of each kind in `ARMS`, one after another: packed by our policy or by nanochat's, read in the
order in which packing fills them (as nanochat reads) or shuffled over the whole text (as we do).
Two more arms have our rows, shuffled: half of what the others read, twice, and the profile `tiny`'s
warmups in place of nanochat's. The stage `pretrain` trains on each with the same number of tokens;
every model is scored on the validation rows of both policies. Printed: the difference of each arm
from the first in percent, mean over the seeds with its 95 % interval (Student's t of the paired
differences).
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.parity import (
    EVAL_TOKENS,
    PACKINGS,
    evaluate,
    make_job,
    prepare,
    prepare_text,
    run_config,
)
from infra.launch.torchrun import run_job
from nanochat_core.config import RunConfig
from nanochat_core.data.row_files import INDEX_FILE, Rows
from nanochat_core.evaluate.intervals import mean_over_seeds
from nanochat_core.model.checkpoint import load_model


class Arm(NamedTuple):
    """One training: the first is what we do, the others differ in one thing or two."""

    policy: str = "default"  # of packing
    shuffled: bool = True  # the rows over the whole text
    epochs: int = 1  # in which the rows of all steps are read
    warmups: tuple[int, int] | None = None  # steps of the rates' and of Muon's momentum


ARMS = {
    "ours": Arm(),
    "ours, in order": Arm(shuffled=False),
    "nanochat, shuffled": Arm("nanochat"),
    "nanochat, in order": Arm("nanochat", shuffled=False),
    "ours, half of it twice": Arm(epochs=2),
    "ours, tiny's warmups": Arm(warmups=(10, 100)),
}


def main() -> None:
    """Train every arm for each seed, print a table."""
    parser = argparse.ArgumentParser(description="What the order and packing of text cost.")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4, help="rows of 512 tokens in a step")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--eval-tokens", type=int, default=EVAL_TOKENS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    run = run_config(options)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    with tempfile.TemporaryDirectory(prefix="bench-order-") as directory:
        text = prepare_text(run, Path(directory) / "text")
        for seed in options.seeds:
            home = Path(directory) / f"seed-{seed}"
            for arm, scores in train_all(replace(run, seed=seed), text, home, options).items():
                found[arm].append(scores)
                print(json.dumps({"seed": seed, "arm": arm, **scores}), flush=True)
    print_table(found)


def train_all(
    run: RunConfig, text: dict[str, Path], directory: Path, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Train on every arm's rows; bits per byte by arm and validation rows."""
    made = prepare(run, text, directory / "data")
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(options.arms):
        began = time.monotonic()
        arm = ARMS[name]
        files = made[PACKINGS[arm.policy]]
        if not arm.shuffled or arm.epochs > 1:
            files = chosen_rows(files, directory / f"rows-{number}", arm, options, run.seed)
        job = make_job(
            "pretrain",
            with_warmups(run, arm.warmups) if arm.warmups else run,
            directory / f"arm-{number}",
            {"rows": files, "tokenizer": made["tokenizer"]},
            device="cpu",
            threads=options.threads,
        )
        run_job(job, processes=1, on_event=lambda event: None)
        model = load_model(job.output, torch.device("cpu"))
        found[name] = evaluate(model, made, options.eval_tokens)
        found[name]["seconds"] = round(time.monotonic() - began)
    return found


def with_warmups(run: RunConfig, steps: tuple[int, int]) -> RunConfig:
    """The run with other warmups of the rates and of Muon's momentum."""
    schedule = replace(run.pretrain.schedule, warmup_steps=steps[0], momentum_warmup_steps=steps[1])
    return replace(run, pretrain=replace(run.pretrain, schedule=schedule))


def chosen_rows(
    source: Path, target: Path, arm: Arm, options: argparse.Namespace, seed: int
) -> Path:
    """As many rows of `source` as the arm's epochs have.

    In order: placed so that training takes the first of `source` as they lie in the file.
    Shuffled: those that training on all of `source` takes in its first steps.
    """
    target.mkdir()
    tree = json.loads((source / INDEX_FILE).read_text(encoding="utf-8"))
    rows = Rows.open(source, "train")
    number = options.steps * options.rows // arm.epochs
    if number > rows.num_rows:
        raise SystemExit(f"{number} rows are needed, the text fills {rows.num_rows}")
    # A step of `number` rows is a whole epoch of a file that has no more.
    placed: npt.NDArray[Any] = rows.ids[rows.step_ids(0, number, seed)]
    if not arm.shuffled:
        few = dataclasses.replace(rows, ids=rows.ids[:number])
        placed = np.empty_like(few.ids)
        placed[few.step_ids(0, number, seed)] = few.ids
    (target / "train.rows").write_bytes(placed.tobytes())
    (target / "val.rows").symlink_to(source / "val.rows")
    (target / INDEX_FILE).write_text(json.dumps(tree | {"num_train": number}), encoding="utf-8")
    return target


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    """Mean bits per byte of each arm, and its difference from the first."""
    first, *_ = found
    for policy in ("default", "nanochat"):
        print(f"validation rows packed by {policy}")
        for arm, scores in found.items():
            values = [one[policy] for one in scores]
            ratios = [
                100 * (value / base[policy] - 1)
                for value, base in zip(values, found[first], strict=True)
            ]
            mean = mean_over_seeds(ratios)
            change = f"{mean.value:+.2f} % ({mean.low:+.2f} to {mean.high:+.2f})"
            print(f"  {arm:24} {statistics.mean(values):.4f}  {change}")


if __name__ == "__main__":
    main()
