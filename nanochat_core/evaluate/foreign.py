"""Evaluate a model of Hugging Face's transformers as ours are: CORE, and questions with letters.

Questions, tokens, choice and mean of CORE are those of `core.py`, and so of nanochat; only the
forward pass is another. A text longer than the model reads loses its beginning, as in nanochat.

Questions with lettered choices are answered by the likeliest letter after the tokenizer's chat
template; without one after the text and "\\nAnswer:", by the letter after a space.

The job writes scores.json and examples.parquet of `base.py` or `chat.py`, whose section it is
given. There is no mean over the chat tasks, since only questions with letters are asked, and no
bits per byte, which depend on rows of tokens. Code that comes with a model is never executed.
"""

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nanochat_core.config import BaseEvalConfig, ChatEvalConfig
from nanochat_core.errors import DataError, ModelError, first_line
from nanochat_core.evaluate import base, chat
from nanochat_core.evaluate.core import answers_from, core_of
from nanochat_core.evaluate.core_questions import Question
from nanochat_core.evaluate.core_tasks import open_suite
from nanochat_core.evaluate.intervals import Interval, metrics_of
from nanochat_core.job import Job
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import World, open_world
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress
from tasks.base import Conversation, prompt_of, text_of
from tasks.registry import has_choices


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A causal language model of `transformers`, with its tokenizer."""

    model: Any  # in evaluation mode
    tokenizer: Any
    device: torch.device

    @property
    def bos(self) -> int:
        """The id that begins every text: <|endoftext|> of GPT-2."""
        words = self.tokenizer
        return words.eos_token_id if words.bos_token_id is None else words.bos_token_id

    @property
    def window(self) -> int:
        """The number of tokens that it can read."""
        return getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, questions: Sequence[Question], greedy: bool) -> list[int]:
        """Return the answers to questions of CORE, as `core.answer`."""
        answers: list[int] = []
        for question in questions:
            HEARTBEAT.beat("evaluating")
            answers += answers_from([question], self._values(question, greedy), greedy=greedy)
        return answers

    def likeliest_letter(self, conversation: Conversation) -> str:
        """Return the likeliest of a question's letters, the first of equals.

        Raises DataError if a letter is not a single token.
        """
        HEARTBEAT.beat("evaluating")
        messages = prompt_of(conversation)["messages"]
        begin, gap, text = [self.bos], " ", f"{text_of(messages[-1]['content'])}\nAnswer:"
        if self.tokenizer.chat_template:
            begin, gap = [], ""  # the template writes what a text begins with
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # the template is a program of the model's
                raise DataError(f"its chat template fails: {first_line(error)}") from error
        ids = self.encode(text)
        letters = conversation["letters"]
        wholes = [self.encode(f"{text}{gap}{letter}") for letter in letters]
        if any(len(whole) != len(ids) + 1 or whole[:-1] != ids for whole in wholes):
            raise DataError(f"a letter of {', '.join(letters)} is not one token after a question")
        read = torch.tensor([[*begin, *ids][-self.window :]])
        logits = self._logits(read, [read.size(1) - 1])[0, 0]
        return letters[int(logits[[whole[-1] for whole in wholes]].argmax())]

    @torch.no_grad()
    def _values(self, question: Question, greedy: bool) -> Tensor:
        """Return for each target of a question its loss, or with `greedy` whether it is likeliest.

        (R,), fp32 or bool.
        """
        if not question.targets:  # all options are equal
            return torch.zeros(0)
        texts, rows = texts_of(question)
        # nanochat crops texts with their last token, which is not read here: it predicts nothing.
        crops = [max(0, len(text) + 1 - self.window) for text in texts]
        if any(min(places, default=c) < c for places, c in zip(rows, crops, strict=True)):
            raise DataError(f"an answer is longer than the {self.window} tokens that it reads")
        read = [torch.tensor(text[crop:]) for text, crop in zip(texts, crops, strict=True)]
        # Padded on the right, where no token that is scored sees it.
        padded = torch.nn.utils.rnn.pad_sequence(read, batch_first=True)
        placed = [[p - crop for p in places] for places, crop in zip(rows, crops, strict=True)]
        column = {place: i for i, place in enumerate(sorted({p for of in placed for p in of}))}
        logits = self._logits(padded, list(column))
        picked = [logits[i, [column[p] for p in places]] for i, places in enumerate(placed)]
        of_rows = torch.cat(picked)  # (R, V)
        targets = torch.tensor(question.targets, device=self.device)
        if greedy:
            return of_rows.argmax(dim=-1) == targets
        return functional.cross_entropy(of_rows, targets, reduction="none")

    @torch.no_grad()
    def _logits(self, ids: Tensor, places: list[int]) -> Tensor:
        """Return the logits after some places of each text: ids (B, T) -> (B, len(places), V)."""
        ids, wanted = ids.to(self.device), torch.tensor(places, device=self.device)
        # Most models compute only the logits that are wanted: of all they take gigabytes.
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            found = self.model(input_ids=ids, logits_to_keep=wanted, use_cache=False).logits
            if found.size(1) == len(places):
                return found.float()
        return self.model(input_ids=ids, use_cache=False).logits[:, wanted].float()


def run(job: Job) -> dict[str, Any]:
    """Evaluate the model; the ranks share the questions.

    Raises ModelError if it cannot be loaded, and DataError if nothing could be evaluated.
    """
    device = open_device(job.resources)
    world = open_world(device)
    progress = Progress(job.events, active=world.is_first)
    model = open_foreign(job.model_input, device)
    if "base_eval" in job.config:
        return _core(job, model, world, progress)
    return _choices(job, model, world, progress)


def open_foreign(directory: Path, device: torch.device) -> ForeignModel:
    """Open the model and the tokenizer of a directory, in the files' precision, without a network.

    Raises ModelError if the package is missing, the model's code is not transformers' own, or the
    files are damaged.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "the package transformers is not installed",
            hint="install it: pip install 'transformers>=5.0'",
        )
    import transformers

    transformers.utils.logging.set_verbosity_error()
    library: Any = transformers
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        model = library.AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", use_safetensors=True, **options
        )
        tokenizer = library.AutoTokenizer.from_pretrained(directory, **options)
    # It raises many types: for a missing file, unknown code, and any kind of damage.
    except Exception as error:
        raise ModelError(
            f"transformers cannot load {directory}: {first_line(error)}",
            hint="it needs whole files of an architecture that transformers itself has",
        ) from error
    # It would warn of every text that is cropped.
    tokenizer.model_max_length = sys.maxsize
    return ForeignModel(model=model.to(device).eval(), tokenizer=tokenizer, device=device)


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


def _core(job: Job, model: ForeignModel, world: World, progress: Progress) -> dict[str, Any]:
    config = BaseEvalConfig.from_tree(job.config["base_eval"])
    suite = open_suite(job.inputs["task_data"] / "core", max_per_task=config.core_max_per_task)
    progress.start(sum(len(task.items) for task in suite.tasks), unit="example")
    core = core_of(model.answer, model, suite, device=model.device, world=world, log=progress.step)
    scores: dict[str, Interval] = {} if core.core is None else {"core": core.core}
    if world.is_first:
        base.write_scores(job, scores, suite, core, core.failed)
    return metrics_of(scores) | base.reasons_of(core.failed)


def _choices(job: Job, model: ForeignModel, world: World, progress: Progress) -> dict[str, Any]:
    config = ChatEvalConfig.from_tree(job.config["chat_eval"])
    tasks = tuple(entry for entry in config.tasks if has_choices(entry.name))
    config = dataclasses.replace(config, tasks=tasks)

    def ask(examples: Sequence[Conversation], max_new_tokens: int) -> chat.Answered:
        return [[(each, model.likeliest_letter(each))] for each in examples]

    opened, failed = chat.open_tasks(job, config)
    records, failed = chat.evaluate_tasks(ask, opened, failed, config, world, progress)
    return chat.write_scores(job, config, records, failed, world, progress, is_whole=False)
