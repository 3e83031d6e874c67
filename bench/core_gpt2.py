"""Calibrate CORE: whether OpenAI's GPT-2 scores here what nanochat publishes for it.

    python bench/core_gpt2.py --bundle .../eval_bundle --weights .../gpt2-xl [--device cuda]

The weights and the tokenizer are read by `transformers` from a local folder as it saves them
(config.json, model.safetensors, tokenizer.json), the questions from an unpacked CORE bundle; also
from GPT2_WEIGHTS and CORE_BUNDLE. Nothing is downloaded. The evaluation is that of `nanochat evals`
for a model of transformers (nanochat_core/evaluate/foreign.py).

Exit 1: the score differs from the published one by more than --tolerance. Without the files or the
package it is skipped with a line that says so. With NANOCHAT_DIR, a checkout of nanochat, its
core_eval.py answers the first --peer-questions of each task too, and every verdict must be equal.

It has not been run on the real files.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanochat_core.evaluate.core import TaskScore, core_of
from nanochat_core.evaluate.core_tasks import CoreSuite, CoreTask, open_suite
from nanochat_core.evaluate.foreign import ForeignModel, open_foreign
from nanochat_core.evaluate.intervals import mean_of
from nanochat_core.runtime.hardware.distributed import ALONE

# Layers -> name and CORE: dev/estimate_gpt3_core.ipynb of nanochat, gpt2-xl also its README.
PUBLISHED = {
    12: ("gpt2", 0.1139),
    24: ("gpt2-medium", 0.1849),
    36: ("gpt2-large", 0.2146),
    48: ("gpt2-xl", 0.2565),
}
TOLERANCE = 0.002


def main() -> None:
    """Evaluate, print a table, compare with the published score."""
    parser = argparse.ArgumentParser(description="Whether GPT-2 has its published CORE here.")
    parser.add_argument("--bundle", type=Path, default=os.environ.get("CORE_BUNDLE"))
    parser.add_argument("--weights", type=Path, default=os.environ.get("GPT2_WEIGHTS"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-per-task", type=int, help="fewer questions: nothing to compare with")
    parser.add_argument("--peer-questions", type=int, default=20, help="of each task, to nanochat")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args()
    if (missing := missing_part(options.bundle, options.weights)) is not None:
        print(f"core_gpt2 is skipped: {missing}")
        return
    gpt2 = open_foreign(options.weights, torch.device(options.device))
    gpt2.model.to(getattr(torch, options.dtype))
    suite = open_suite(options.bundle, max_per_task=options.max_per_task)
    if suite.failed:
        sys.exit(f"the bundle is not whole: {dict(suite.failed)}")
    scores = evaluate(gpt2, suite)
    core = mean_of([score.centred for score in scores])
    print(f"CORE {core.value:.4f} ({core.low:.4f} to {core.high:.4f})")
    failures: list[str] = []
    layers = gpt2.model.config.n_layer
    if layers in PUBLISHED and options.max_per_task is None:
        name, published = PUBLISHED[layers]
        apart = core.value - published
        print(f"{name}: published {published}, {apart:+.4f} apart, {options.tolerance} allowed")
        failures += ["CORE is not the published one"] if abs(apart) > options.tolerance else []
    if checkout := os.environ.get("NANOCHAT_DIR"):
        equal, asked = compare_with_peer(
            gpt2, suite, scores, Path(checkout), options.peer_questions
        )
        print(f"nanochat's core_eval.py: {equal} of {asked} verdicts are equal")
        failures += ["verdicts differ"] if equal < asked else []
    if failures:
        sys.exit("; ".join(failures))


def missing_part(bundle: Path | None, weights: Path | None) -> str | None:
    """Return what is missing to run, in a line; None if nothing is."""
    if importlib.util.find_spec("transformers") is None:
        return "the package transformers is not installed"
    if bundle is None or not (bundle / "core.yaml").is_file():
        return "no CORE bundle: --bundle or CORE_BUNDLE names no folder with core.yaml"
    if weights is None or not (weights / "config.json").is_file():
        return "no weights: --weights or GPT2_WEIGHTS names no folder with config.json"
    return None


def evaluate(gpt2: ForeignModel, suite: CoreSuite) -> list[TaskScore]:
    """Return and print the score of each task."""
    core = core_of(gpt2.answer, gpt2, suite, device=gpt2.device, world=ALONE, log=lambda _: None)
    if core.failed:
        sys.exit(f"not evaluated: {dict(core.failed)}")
    for score in core.tasks:
        print(f"  {score.label:36} {score.accuracy.value:.4f}  {score.centred.value:+.4f}")
    return list(core.tasks)


def compare_with_peer(
    gpt2: ForeignModel, suite: CoreSuite, scores: Sequence[TaskScore], checkout: Path, most: int
) -> tuple[int, int]:
    """Return how many verdicts of nanochat's own code are equal, of how many."""
    ask = open_peer(gpt2, checkout)
    equal = asked = 0
    for task, score in zip(suite.tasks, scores, strict=True):
        if task.num_shots >= len(task.items):  # nanochat stops there
            continue
        for place, verdict in enumerate(score.verdicts[:most]):
            equal += ask(task, place) == verdict
            asked += 1
    return equal, asked


def open_peer(gpt2: ForeignModel, checkout: Path) -> Callable[[CoreTask, int], bool]:
    """Return nanochat's evaluation of one question with the same model and tokenizer."""
    # From its file: its package and ours both have a `tasks`.
    spec = importlib.util.spec_from_file_location(
        "peer_core_eval", checkout / "nanochat" / "core_eval.py"
    )
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)

    class Model:
        max_seq_len = gpt2.window

        def __call__(self, ids: Tensor) -> Tensor:
            return gpt2.model(input_ids=ids).logits

    class Words:
        def get_bos_token_id(self) -> int:
            return gpt2.bos

        def __call__(self, texts: Sequence[str], prepend: int) -> list[list[int]]:
            return [[prepend, *gpt2.encode(text)] for text in texts]

    def ask(task: CoreTask, place: int) -> bool:
        meta = {
            "task_type": task.kind,
            "num_fewshot": task.num_shots,
            "continuation_delimiter": task.delimiter,
        }
        return bool(peer.evaluate_example(place, Model(), Words(), task.items, gpt2.device, meta))

    return ask


if __name__ == "__main__":
    main()
