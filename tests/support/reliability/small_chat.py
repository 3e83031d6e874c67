"""Jobs of the chat stages small enough to be run, killed and started again many times.

The model is of two layers, and the sums it learns are few: after `sft` it knows some by heart and
others not, so that `rl` has something to learn from.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from flows.stages import CHAT_MODELS, stage_named
from nanochat_core import scaling
from nanochat_core.config import ModelConfig
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.base import text_of
from tasks.registry import generate
from tests.support.reliability.small_training import ready, small_resources

LENGTH, VOCAB = 128, 420
STAGES = tuple(stage.name for stage in CHAT_MODELS)
INPUT = {stage.name: stage.inputs[0].name for stage in CHAT_MODELS}
EXAMPLES = {"spelling": 60, "arithmetic": 12}
SEED = 3


def make_chat_inputs(directory: Path) -> dict[str, Path]:
    """Examples, and the model that each of the chat stages continues, by stage."""
    model = ModelConfig(
        depth=2,
        width=64,
        num_heads=2,
        num_kv_heads=2,
        sequence_len=LENGTH,
        vocab_size=VOCAB,
        windows=(32, LENGTH),
    )
    texts = (
        text_of(message["content"])
        for name in EXAMPLES
        for example in generate(name, "train", 200, grade=1, seed=SEED)
        for message in example["messages"]
    )
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir(parents=True)
    Tokenizer.train(texts, vocab_size=VOCAB).save(tokenizer)
    inputs = {"pretrain": directory / "pretrain"}
    inputs["pretrain"].mkdir()
    gpt = GPT(model, scaling.numerics("fp32"))
    gpt.init_weights(SEED)
    rates = scaling.optimizer_for(
        model, tokens=10**6, reference_tokens=10**6, total_batch_size=2**17
    )
    state = Optimizer(gpt, rates, precision="fp32", world=ALONE).gather()
    save_model(inputs["pretrain"], gpt, tokenizer=tokenizer, optimizer=state, made_by="pretrain")
    datasets = [
        scaling.dataset(name, num_train=count, num_test=6).tree()
        for name, count in EXAMPLES.items()
    ]
    sections: dict[str, Any] = {"task_data": {"datasets": datasets}}
    inputs["task_data"] = _run("task_data", directory, inputs, sections)
    for stage in STAGES[:-1]:
        sections = {"optimizer": rates.tree(), stage: section_of(stage, long=False)}
        inputs[stage] = _run(stage, directory, inputs, sections)
    (directory / "optimizer.json").write_text(json.dumps(rates.tree()), encoding="utf-8")
    return inputs


def make_chat_job(directory: Path, stage: str, inputs: dict[str, Path]) -> Job:
    """A job of a chat stage that saves after every fifth step."""
    rates = json.loads((inputs["pretrain"].parent / "optimizer.json").read_text(encoding="utf-8"))
    sections = {"optimizer": rates, stage: section_of(stage, long=True)}
    return _job(stage, directory, inputs, sections)


def section_of(stage: str, *, long: bool) -> dict[str, Any]:
    """The stage's config: `long` enough to be killed, or what its successor is to begin with."""
    if stage == "rl":
        return {
            "task": "arithmetic",
            "num_steps": 40,
            "examples_per_step": 4,
            "samples_per_example": 6,
            "max_new_tokens": 16,
            "temperature": 1.0,
            "top_k": 50,
            "lr_fraction": 0.02,
            "eval_examples": 6,
        }
    names = EXAMPLES if stage == "midtrain" else ("arithmetic",)
    mixture = [{"task": name, "num_examples": None, "epochs": 1} for name in names]
    epochs = {"midtrain": 20 if long else 4, "sft": 60 if long else 30}
    return {
        "mixture": mixture,
        "num_epochs": epochs[stage],
        "total_batch_size": 4 * LENGTH,
        "lr_fraction": 0.5,
        "schedule": scaling.chat_schedule(warmdown_fraction=0.2).tree(),
        "eval_examples": 12,
    }


def _run(name: str, root: Path, inputs: dict[str, Path], sections: dict[str, Any]) -> Path:
    """Run a stage in this process; returns its output."""
    job = _job(name, root / name, inputs, sections)
    importlib.import_module(job.entry).run(job)
    return job.output


def _job(stage: str, directory: Path, inputs: dict[str, Path], sections: dict[str, Any]) -> Job:
    needed = () if stage == "task_data" else (INPUT[stage], "task_data")
    job = Job(
        directory=directory,
        stage=stage,
        entry=stage_named(stage).entry,
        fingerprint="0" * 12,
        config={"seed": SEED, **sections},
        inputs={name: inputs[name] for name in needed},
        resources=small_resources(eval_every_steps=20),
    )
    return ready(job)
