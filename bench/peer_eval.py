"""The peer's side of `bench/eval.py`: nanochat's own functions on the same model and questions.

A process of its own, since both have a package `tasks`. Its arguments are a checkout of nanochat, a
folder with model.safetensors, shape.json, tokenizer/ and questions.json, a number of threads, and a
device; it reads a line with a case's name and answers with one of JSON: {"cpu", "wall", "answers"}.
"""

import base64
import contextlib
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[], list[Any]]


def main() -> None:
    """Answer until nobody asks any more."""
    checkout, folder, threads, device = sys.argv[1:]
    # Without our repository, whose `tasks` would come before the checkout's: that has no __init__.
    ours = Path(__file__).resolve().parents[1]
    sys.path[:] = [checkout, *(p for p in sys.path[1:] if Path(p).resolve() != ours)]
    # Its scripts name datasets that are not loaded here; what is not installed is not needed.
    for name, attribute in (("datasets", "load_dataset"), ("wandb", "init")):
        if not installed(name):
            sys.modules[name] = types.ModuleType(name)
            setattr(sys.modules[name], attribute, None)
    import torch

    torch.set_num_threads(int(threads))
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # its scripts print what they do
        cases = open_cases(Path(folder), device)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            run = cases[line.strip()]
            wall, cpu = time.perf_counter(), time.process_time()
            found = run()
            if device == "cuda":
                torch.cuda.synchronize()
            reported = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            print(json.dumps({**reported, "answers": found}), file=answers, flush=True)


def installed(module: str) -> bool:
    """Whether a module can be imported."""
    import importlib.util

    return importlib.util.find_spec(module) is not None


def open_cases(folder: Path, device: str) -> dict[str, Run]:
    """What can be asked for, by name."""
    # A checkout is not a package of ours: nothing can be said of its types.
    from nanochat.core_eval import evaluate_example  # pyright: ignore[reportMissingImports]
    from nanochat.engine import Engine  # pyright: ignore[reportMissingImports]
    from scripts.chat_eval import (  # pyright: ignore[reportMissingImports]
        run_categorical_eval,
        run_generative_eval,
    )

    tokenizer, model = open_tokenizer(folder / "tokenizer"), open_model(folder, device)
    questions = json.loads((folder / "questions.json").read_text())
    cases: dict[str, Run] = {}

    def add_core(name: str, task: dict[str, Any]) -> None:
        meta = {
            "task_type": task["kind"],
            "num_fewshot": task["num_shots"],
            "continuation_delimiter": task["delimiter"],
        }

        def run() -> list[Any]:
            places = range(task["asked"])
            data = task["items"]
            return [evaluate_example(i, model, tokenizer, data, device, meta) for i in places]

        cases[name] = run

    def add_chat(name: str, grade: Callable[[Recorder], Any]) -> None:
        def run() -> list[Any]:
            task = Recorder(questions[name]["conversations"])
            grade(task)
            return task.answers

        cases[name] = run

    for name, task in questions["core"].items():
        add_core(name, task)
    engine, settings = Engine(model, tokenizer), questions["generative"]
    add_chat("categorical", lambda task: run_categorical_eval(task, tokenizer, model, 8))
    add_chat(
        "generative",
        lambda task: run_generative_eval(
            task, tokenizer, model, engine, 1, settings["max_new_tokens"], 0.0, 50
        ),
    )
    return cases


class Recorder:
    """A task of its kind that keeps the answers."""

    def __init__(self, conversations: list[Any]) -> None:
        self.conversations = conversations
        self.answers: list[str] = []

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, place: int) -> Any:
        return self.conversations[place]

    def evaluate(self, conversation: Any, answer: str) -> bool:
        """Neither right nor wrong."""
        self.answers.append(answer)
        return False


def open_tokenizer(folder: Path) -> Any:
    """Its tokenizer with our tokens."""
    import tiktoken
    from nanochat.tokenizer import RustBPETokenizer  # pyright: ignore[reportMissingImports]

    settings = json.loads((folder / "tokenizer.json").read_text())
    lines = (folder / "tokenizer.tiktoken").read_bytes().splitlines()
    pairs = (line.split() for line in lines)
    encoding = tiktoken.Encoding(
        name="ours",
        pat_str=settings["pattern"],
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in pairs},
        special_tokens=settings["special_tokens"],
    )
    return RustBPETokenizer(encoding, "<|bos|>")


def open_model(folder: Path, device: str) -> Any:
    """Its model with our weights."""
    import torch
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file

    shape = json.loads((folder / "shape.json").read_text())
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    model.to_empty(device=device)
    model.init_weights()  # tables that are no parameters
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


if __name__ == "__main__":
    main()
