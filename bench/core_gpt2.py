"""Calibrate CORE: whether OpenAI's GPT-2 scores here what nanochat publishes for it.

    python bench/core_gpt2.py --bundle .../eval_bundle --weights .../gpt2-xl [--device cuda]

The weights and the tokenizer are read by `transformers` from a local folder as it saves them
(config.json, model.safetensors, tokenizer.json), the questions from an unpacked CORE bundle; also
from GPT2_WEIGHTS and CORE_BUNDLE. Nothing is downloaded. Questions, tokens, choice and mean are
those of `base_eval`; only the forward pass is another, since our model has no learned positions,
biases and LayerNorm. GPT-2 reads 1,024 tokens: of a longer text, as in nanochat, the last ones.

Exit 1: the score differs from the published one by more than --tolerance. Without the files or the
package it is skipped with a line that says so. With NANOCHAT_DIR, a checkout of nanochat, its
core_eval.py answers the first --peer-questions of each task too, and every verdict must be equal.

It has not been run on the real files.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nanochat_core.evaluate.core import TaskScore, answers_from, score_task
from nanochat_core.evaluate.core_questions import Question, make_question
from nanochat_core.evaluate.core_tasks import OPTIONS, CoreSuite, CoreTask, open_suite
from nanochat_core.evaluate.intervals import mean_of

# Layers -> name and CORE: dev/estimate_gpt3_core.ipynb of nanochat, gpt2-xl also its README.
PUBLISHED = {
    12: ("gpt2", 0.1139),
    24: ("gpt2-medium", 0.1849),
    36: ("gpt2-large", 0.2146),
    48: ("gpt2-xl", 0.2565),
}
TOLERANCE = 0.002


@dataclass(frozen=True, kw_only=True)
class Gpt2:
    """A GPT-2 of `transformers`, with its tokenizer."""

    model: Any  # GPT2LMHeadModel, in evaluation mode
    tokenizer: Any
    device: torch.device

    @property
    def bos(self) -> int:
        """The id of <|endoftext|>, which begins every text."""
        return self.tokenizer.bos_token_id

    @property
    def window(self) -> int:
        """How many tokens it can read."""
        return self.model.config.n_positions

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)


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
    gpt2 = open_gpt2(options.weights, torch.device(options.device), options.dtype)
    suite = open_suite(options.bundle, max_per_task=options.max_per_task)
    if suite.failed:
        sys.exit(f"the bundle is not whole: {dict(suite.failed)}")
    scores = list(evaluate(gpt2, suite))
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


def open_gpt2(weights: Path, device: torch.device, dtype: str = "float32") -> Gpt2:
    """Open the model and the tokenizer of a folder, without a network."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(
        weights, dtype=getattr(torch, dtype), local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    # It would warn of every text that is cropped below.
    tokenizer.model_max_length = sys.maxsize
    return Gpt2(model=cast("Any", model).to(device).eval(), tokenizer=tokenizer, device=device)


def evaluate(gpt2: Gpt2, suite: CoreSuite) -> Iterator[TaskScore]:
    """Yield and print the score of each task."""
    for task in suite.tasks:
        greedy = task.kind not in OPTIONS
        answers: list[int] = []
        for place in range(len(task.items)):
            question = make_question(task, place, cast("Any", gpt2))
            values = read_values(gpt2, question, greedy=greedy)
            answers += answers_from([question], values, greedy=greedy)
        score = score_task(task, answers)
        print(f"  {task.label:36} {score.accuracy.value:.4f}  {score.centred.value:+.4f}")
        yield score


@torch.no_grad()
def read_values(gpt2: Gpt2, question: Question, *, greedy: bool) -> Tensor:
    """Return for each target of a question its loss, or with `greedy` whether it is likeliest."""
    texts, rows = texts_of(question)
    # nanochat crops texts with their last token, which is not read here: it predicts nothing.
    crops = [max(0, len(text) + 1 - gpt2.window) for text in texts]
    read = [torch.tensor(text[crop:]) for text, crop in zip(texts, crops, strict=True)]
    # Padded on the right, where no token that is scored sees it.
    padded = torch.nn.utils.rnn.pad_sequence(read, batch_first=True).to(gpt2.device)
    hidden = gpt2.model.transformer(input_ids=padded).last_hidden_state
    picked = []
    for of_text, places, crop in zip(hidden, rows, crops, strict=True):
        assert min(places, default=crop) >= crop, "an answer is longer than the model reads"
        picked.append(of_text[[place - crop for place in places]])
    logits = gpt2.model.lm_head(torch.cat(picked)).float()
    targets = torch.tensor(question.targets, dtype=torch.long, device=gpt2.device)
    if greedy:
        return logits.argmax(dim=-1) == targets
    return functional.cross_entropy(logits, targets, reduction="none")


def texts_of(question: Question) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each distinct text, and the places in it that predict its targets."""
    tree, fork = question.tree, len(question.tree.trunk)
    ends = np.cumsum(question.lengths)
    texts: list[list[int]] = []
    rows: list[list[int]] = []
    start = fork  # of the branch among the tree's tokens
    branches = tree.branches or ((),)
    for branch, count, end in zip(branches, question.lengths, ends, strict=True):
        of_text = tree.rows[end - count : end]
        rows.append([row if row < fork else row - start + fork for row in of_text])
        texts.append([*tree.trunk, *branch])
        start += len(branch)
    return texts, rows


def compare_with_peer(
    gpt2: Gpt2, suite: CoreSuite, scores: Sequence[TaskScore], checkout: Path, most: int
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


def open_peer(gpt2: Gpt2, checkout: Path) -> Callable[[CoreTask, int], bool]:
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
