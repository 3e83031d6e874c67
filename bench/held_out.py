"""Score models of profile `tiny` on many held-out questions, and compare their sums in pairs.

    python -m bench.held_out midtrain@tiny sft@tiny rl@tiny [--number 1000] [--threads 1] [--tasks]

Each model answers greedily: five-turn conversations of grades 1 and 3, with its own answers in
view, and questions of the tasks `spelling` (grade 3) and `arithmetic` (sums in short stories, grade
1). They are generated anew with a seed of their own and are of the test split, so that no model was
trained on one. Prints shares of right answers in percent with Wilson's 95 % intervals, the shares
of each kind of turn, and the difference of each model's spelling and sums from the first model's,
paired by question. With --tasks the conversations, some of whose turns are about the model itself,
are left out: for models with other identities.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch

from flows.artifacts.names import open_model
from flows.cli.options import StoreOptions
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate.generate import converse, greedy_answers
from nanochat_core.evaluate.intervals import Interval, paired_difference, share_of
from nanochat_core.model.checkpoint import load_model
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.registry import are_correct, generate

SEED = 977
GRADES = {"spelling": 3, "arithmetic": 1}
MAX_NEW_TOKENS = 64


def main() -> None:
    """Print the scores of each model."""
    parser = argparse.ArgumentParser(description="Score models of tiny on held-out questions.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    first: dict[str, list[bool]] = {}
    for name in options.models:
        engine = open_engine(name)
        print(name)
        for grade in () if options.tasks else (1, 3):
            print_conversations(engine, options.number, grade=grade)
        for task in GRADES:
            right = grade_answers(engine, task, options.number)
            print(f"  {task:14}{in_percent(share_of(sum(right), len(right)))}")
            paired = in_percent(difference(first.setdefault(task, right), right))
            print(f"  {'  paired':14}{paired} from {options.models[0]}")


def grade_answers(engine: Engine, task: str, number: int) -> list[bool]:
    """Return whether each greedy answer to a task's held-out questions is right."""
    examples = list(generate(task, "test", number, grade=GRADES[task], seed=SEED))
    answers = greedy_answers(engine, examples, max_new_tokens=MAX_NEW_TOKENS)
    return are_correct(task, list(zip(examples, answers, strict=True)))


def open_engine(name: str) -> Engine:
    """Return an engine with the model called `name`, on the CPU."""
    options = StoreOptions(store=None, home=None)
    directory: Path = open_model(options.open_store(), name, cache=options.cache, warn=print)
    model = load_model(directory, torch.device("cpu"))
    tokenizer = Tokenizer.load(directory / "tokenizer")
    return Engine(model, tokenizer, precision="auto", num_slots=64, on_choice=lambda _: None)


def print_conversations(engine: Engine, number: int, *, grade: int) -> None:
    """Print the share of conversations with all turns right, and of each kind of turn."""
    conversations = list(generate("conversation", "test", number, grade=grade, seed=SEED))
    asked, right, whole = Counter[str](), Counter[str](), 0
    for turns in converse(engine, conversations, max_new_tokens=MAX_NEW_TOKENS):
        graded = are_correct("conversation", turns)
        whole += all(graded)
        for (turn, _), is_right in zip(turns, graded, strict=True):
            asked[turn["kind"]] += 1
            right[turn["kind"]] += is_right
    kinds = ", ".join(f"{kind} {right[kind] / asked[kind]:.1%}" for kind in sorted(asked))
    print(f"  {f'grade {grade}':14}{in_percent(share_of(whole, number))}; {kinds}")


def difference(old: list[bool], new: list[bool]) -> Interval:
    """Return the mean difference of two models' answers to the same questions."""
    pairs = Counter(zip(old, new, strict=True))
    return paired_difference(len(old), pairs[True, True], pairs[False, True], pairs[True, False])


def in_percent(share: Interval) -> str:
    """Return a value and its interval in percent."""
    return f"{share.value:7.1%} [{share.low:.1%}, {share.high:.1%}]"


if __name__ == "__main__":
    main()
