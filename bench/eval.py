"""Evaluation: `python bench/eval.py`, beside nanochat's where NANOCHAT_DIR is its checkout.

Both sides evaluate one random model on synthetic questions, case after case in alternation: the
seven shapes of question that CORE's tasks have, prompts with lettered choices as MMLU has, and
answers to be written as GSM8K has. What is timed is all that a question costs, its text to begin
with. The peer computes in `--peer-dtype`; ours is timed in fp32, and in bf16, to which nothing but
the model's precision is different. A table, and one line of JSON.

"core" is the rate over one question of each shape. On a busy machine believe CPU seconds; on a GPU
(--device cuda, not run there yet) seconds of the clock.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanochat_core import scaling
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.speed import wait_for_gpu
from nanochat_core.evaluate import core
from nanochat_core.evaluate.core_questions import make_question
from nanochat_core.evaluate.core_tasks import OPTIONS, CoreTask
from nanochat_core.evaluate.generate import greedy_answers
from nanochat_core.evaluate.multiple_choice import likeliest_letters
from nanochat_core.job import Resources
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from tasks.kinds import multiple_choice

VOCAB = 32768
SINGLE, PAIRS = 256, VOCAB - 256 - len(SPECIAL_TOKENS)
LAST_LINES = 15  # of a peer that failed, to print
POOL = 16  # examples of a task at least: shots are drawn from them
MC, SCHEMA, LM = "multiple_choice", "schema", "language_modeling"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What the peer says of a case."""

    wall: float  # seconds
    cpu: float
    answers: list[Any]


Run = Callable[[], list[Any] | Reported]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How long the texts of a task are, in words."""

    kind: str
    num_shots: int
    question: int
    options: int  # how many; a continuation is one
    option: int


# Words are of some 3 tokens here, so there are fewer of them than in the tasks that these are like.
SHAPES = {
    "hellaswag": Shape(kind=MC, num_shots=0, question=20, options=4, option=10),
    "arc": Shape(kind=MC, num_shots=10, question=9, options=4, option=2),
    "boolq": Shape(kind=MC, num_shots=10, question=40, options=2, option=1),
    "winograd": Shape(kind=SCHEMA, num_shots=0, question=5, options=2, option=5),
    "lambada": Shape(kind=LM, num_shots=0, question=30, options=1, option=1),
    "wikidata": Shape(kind=LM, num_shots=10, question=5, options=1, option=1),
    "squad": Shape(kind=LM, num_shots=10, question=45, options=1, option=1),
}
LETTERED = Shape(kind=MC, num_shots=0, question=25, options=4, option=4)
WRITTEN = 30  # words of a question whose answer is to be written


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=(*SHAPES, "categorical", "generative"))
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--core", type=int, default=3, help="questions of each shape")
    parser.add_argument("--categorical", type=int, default=32, help="questions")
    parser.add_argument("--generative", type=int, default=8, help="questions")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    options = parser.parse_args()
    device = open_device(  # as the workers of the stages do
        Resources(
            device=options.device,
            threads=options.threads,
            device_batch_size=1,
            save_every_seconds=0.0,
            eval_every_steps=0,
        )
    )
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None:
        print("NANOCHAT_DIR is not set: there is no peer to compare with", file=sys.stderr)
    tokenizer = make_tokenizer()
    tasks = {
        name: make_task(name, shape, count=max(POOL, options.core))
        for name, shape in SHAPES.items()
    }
    chats = make_chats(options)
    models = {p: make_model(options.depth, tokenizer, p).to(device) for p in options.precisions}
    runs = {
        f"ours {precision}": our_cases(model, tokenizer, tasks, chats, options)
        for precision, model in models.items()
    }
    for side, of_side in runs.items():
        runs[side] = {n: run for n, run in of_side.items() if n in (options.cases or of_side)}
    with contextlib.ExitStack() as stack:
        if checkout is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_folder(folder, next(iter(models.values())), tokenizer, tasks, chats, options)
            ask = stack.enter_context(open_peer(Path(checkout), folder, options))
            peer = f"peer {options.peer_dtype}"
            names = next(iter(runs.values()))
            runs = {peer: {name: functools.partial(ask, name) for name in names}, **runs}
        found = measure(runs, options.rounds)
    unit = "cpu" if options.device == "cpu" else "wall"
    report = summarise(found, compared=checkout is not None, unit=unit)
    settings = {"settings": vars(options), "torch": torch.__version__}
    print(json.dumps({**settings, **report}))


def measure(runs: dict[str, dict[str, Run]], rounds: int) -> dict[str, Any]:
    """case -> {"answers": {side: [...]}, "cpu": {side: [seconds]}, "wall": ...}."""
    cases = list(next(iter(runs.values())))
    found: dict[str, Any] = {
        case: {"answers": {}, "cpu": {s: [] for s in runs}, "wall": {s: [] for s in runs}}
        for case in cases
    }
    for number in range(rounds + 1):
        for case in cases:
            for side, of_side in runs.items():
                wait_for_gpu()
                wall, cpu = time.perf_counter(), time.process_time()
                answers = of_side[case]()
                wait_for_gpu()
                reported = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                if isinstance(answers, Reported):  # another process took the time
                    reported, answers = {"wall": answers.wall, "cpu": answers.cpu}, answers.answers
                if number:  # the first round warms up
                    for unit, seconds in reported.items():
                        found[case][unit][side].append(seconds)
                found[case]["answers"][side] = answers
        print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    return found


def summarise(found: dict[str, Any], *, compared: bool, unit: str) -> dict[str, Any]:
    """Print a table by "cpu" or "wall" seconds; return rates, ratios, how many answers agree."""
    names = list(next(iter(found.values()))["cpu"])
    rates: dict[str, dict[str, float]] = {}
    for case, of_case in found.items():
        count = len(of_case["answers"][names[0]])
        rates[case] = {
            f"{side} per {kind} second": count / statistics.median(of_case[kind][side])
            for side in names
            for kind in ("cpu", "wall")
        }
    if set(SHAPES) <= set(rates):
        rates["core"] = {
            key: len(SHAPES) / sum(1 / rates[case][key] for case in SHAPES)
            for key in rates[next(iter(SHAPES))]
        }
    report: dict[str, Any] = {"rates": rates, "ratios": {}, "equal": {}}
    for case, of_case in rates.items():
        line = [f"{case:12}"]
        for side in names:
            rate = of_case[f"{side} per {unit} second"]
            line.append(f"{side} {rate:8.2f}/s")
            if compared and side != names[0]:
                ratio = rate / of_case[f"{names[0]} per {unit} second"]
                report["ratios"].setdefault(side, {})[case] = round(ratio, 2)
                line.append(f"{ratio:5.1f}x")
                if case in found:
                    pairs = zip(*(found[case]["answers"][s] for s in (names[0], side)), strict=True)
                    equal = sum(a == b for a, b in pairs)
                    total = len(found[case]["answers"][side])
                    report["equal"].setdefault(side, {})[case] = [equal, total]
                    line.append(f"{equal}/{total} equal")
        print("  ".join(line))
    return report


def our_cases(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: dict[str, CoreTask],
    chats: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, Run]:
    """What the stages call."""
    engine = Engine(model, tokenizer)

    def core_case(task: CoreTask) -> Run:
        def run() -> list[Any]:
            questions = [make_question(task, i, tokenizer) for i in range(options.core)]
            greedy = task.kind not in OPTIONS
            answers = core.answer(model, questions, greedy=greedy)
            golds = [1 if greedy else task.items[i]["gold"] for i in range(options.core)]
            return [a == gold for a, gold in zip(answers, golds, strict=True)]

        return run

    lettered, written = (chats[n]["conversations"] for n in ("categorical", "generative"))
    return {
        **{name: core_case(task) for name, task in tasks.items()},
        "categorical": lambda: likeliest_letters(model, tokenizer, lettered),
        "generative": lambda: greedy_answers(engine, written, max_new_tokens=options.new_tokens),
    }


@contextlib.contextmanager
def open_peer(
    checkout: Path, folder: Path, options: argparse.Namespace
) -> Iterator[Callable[[str], Reported]]:
    """Another process, which is asked for a case by name."""
    log = folder / "log"
    process = subprocess.Popen(
        [
            *(sys.executable, Path(__file__).with_name("peer_eval.py"), checkout, folder),
            *(str(options.threads), options.device),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env={**os.environ, "NANOCHAT_DTYPE": options.peer_dtype, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def read() -> str:
        line = stdout.readline()
        if not line:
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            sys.exit("\n".join([f"the peer ended with {process.wait()}:", *lines[-LAST_LINES:]]))
        return line

    def ask(case: str) -> Reported:
        print(case, file=stdin, flush=True)
        return Reported(**json.loads(read()))

    try:
        read()
        yield ask
    finally:
        stdin.close()
        process.wait()


def write_folder(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    tasks: dict[str, CoreTask],
    chats: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """What the peer reads."""
    c = model.config
    shape = {
        "sequence_len": c.sequence_len,
        "vocab_size": c.vocab_size,
        "n_layer": c.depth,
        "n_head": c.num_heads,
        "n_kv_head": c.num_kv_heads,
        "n_embd": c.width,
    }
    (folder / "shape.json").write_text(json.dumps(shape))
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    core_tasks = {n: {**dataclasses.asdict(t), "asked": options.core} for n, t in tasks.items()}
    (folder / "questions.json").write_text(json.dumps({**chats, "core": core_tasks}))


def make_tokenizer() -> Tokenizer:
    """As many ids as nanochat's: the bytes, pairs of them, and the special tokens."""
    ranks = {bytes([i]): i for i in range(SINGLE)}
    ranks |= {bytes(divmod(i, SINGLE)): SINGLE + i for i in range(PAIRS)}
    return Tokenizer(ranks)


def make_model(depth: int, tokenizer: Tokenizer, precision: str) -> GPT:
    """Random weights of which every block counts; special tokens are never likely."""
    config = scaling.model_for_depth(depth, vocab_size=VOCAB)
    model = GPT(config, scaling.numerics(precision))
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_proj" in name:
                parameter.normal_(std=config.width**-0.5, generator=generator)
        model.lm_head.weight.normal_(std=0.1, generator=generator)
        model.lm_head.weight[tokenizer.bos :] = 0.0
    return model.eval()


def make_task(name: str, shape: Shape, *, count: int) -> CoreTask:
    """So many examples of this shape; shots are drawn from them too."""
    rng = random.Random(name)
    items: list[dict[str, Any]] = []
    for _ in range(count):
        question, gold = say(rng, shape.question), rng.randrange(shape.options)
        options = [say(rng, shape.option) for _ in range(shape.options)]
        if shape.kind == MC:
            items.append({"query": question, "choices": options, "gold": gold})
        elif shape.kind == SCHEMA:
            contexts = [f"{question} {say(rng, 1)}" for _ in options]
            continuation = say(rng, shape.option)
            items.append({"context_options": contexts, "continuation": continuation, "gold": gold})
        else:
            items.append({"context": question, "continuation": options[0]})
    return CoreTask(
        label=name,
        kind=shape.kind,
        num_shots=shape.num_shots,
        delimiter=" ",
        baseline=0.0,
        items=tuple(items),
    )


def make_chats(options: argparse.Namespace) -> dict[str, Any]:
    """Conversations of both kinds."""
    rng = random.Random(3)
    lettered = [
        multiple_choice.make_conversation(
            say(rng, LETTERED.question),
            list("ABCD"),
            [say(rng, LETTERED.option) for _ in range(LETTERED.options)],
            rng.choice("ABCD"),
        )
        for _ in range(options.categorical)
    ]
    written = [
        {
            "messages": [
                {"role": "user", "content": say(rng, rng.randint(WRITTEN // 2, 2 * WRITTEN))},
                {"role": "assistant", "content": "#### 1"},
            ]
        }
        for _ in range(options.generative)
    ]
    return {
        "categorical": {"conversations": lettered},
        "generative": {"conversations": written, "max_new_tokens": options.new_tokens},
    }


def say(rng: random.Random, words: int) -> str:
    """So many words of random letters."""
    lengths: Sequence[int] = rng.choices(range(2, 10), k=words)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=n)) for n in lengths)


if __name__ == "__main__":
    main()
