"""Stage `base_eval`: bits per byte of the base model, CORE, and continuations of a few prompts.

    scores.json       {format, val_bpb, train_bpb, core, intervals: {name: [low, high]},
                       tasks: {label: {accuracy, correct, total, low, high, centred, baseline}},
                       failed: {label: reason}, suite}
    examples.parquet  task, place, answer, gold, correct: every example of CORE
    losses.parquet    split, place, nats, bytes: every row of text, so that models can be paired
    samples.jsonl     {prompt, text}, `text` being the greedy continuation without the prompt

Intervals are of 95 %, see intervals.py. `baseline` is the accuracy of guessing. `suite` is the
digest of CORE's questions: only scores of the same suite are comparable. Without the metric's data
(`task_data.core_bundle`) `core` and `suite` are null. A task that cannot be evaluated, because a
line is damaged for instance, is in `failed`, and `core` is null: a mean without it would be another
metric. If nothing of the bundle can be read, `failed` has an entry `core`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nanochat_core.config import BaseEvalConfig
from nanochat_core.data.row_files import Rows
from nanochat_core.engine.engine import Engine
from nanochat_core.errors import DataError
from nanochat_core.evaluate.bits_per_byte import row_losses
from nanochat_core.evaluate.core import CoreScore, TaskScore, core_metric
from nanochat_core.evaluate.core_tasks import CoreSuite, open_suite
from nanochat_core.evaluate.generate import complete_greedily
from nanochat_core.evaluate.intervals import Interval, metrics_of, ratio_of
from nanochat_core.evaluate.records import write_samples, write_table
from nanochat_core.job import Job, write_json
from nanochat_core.model.attention import choose
from nanochat_core.model.checkpoint import load_model
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import World, open_world
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer

FORMAT = 2
# Of a score, and of a row's nats: fp32 losses near 10 differ by 1e-6 with the device batch.
DECIMALS, DECIMALS_OF_ROW = 5, 2
SPLITS = ("val", "train")
EXAMPLES = pa.schema(
    [
        ("task", pa.string()),
        ("place", pa.int32()),  # index in the task's examples, shuffled and cut
        ("answer", pa.int32()),  # index of an option, or 1 for a right continuation, else 0
        ("gold", pa.int32()),
        ("correct", pa.bool_()),
    ]
)
LOSSES = pa.schema(
    [
        ("split", pa.string()),
        ("place", pa.int32()),  # index of the row in its split
        ("nats", pa.float32()),
        ("bytes", pa.int32()),
    ]
)


def run(job: Job) -> dict[str, Any]:
    """Evaluate the base model. Raises ModelError or DataError if an input is unusable."""
    config = BaseEvalConfig.from_tree(job.config["base_eval"])
    device = open_device(job.resources)
    world = open_world(device)
    progress = Progress(job.events, active=world.is_first)
    model = load_model(job.model_input, device)
    choose(
        job.resources.attention,
        device,
        model.dtype,
        strict=job.resources.determinism == "strict",
        world=world,
    )
    if job.resources.compile:
        model.compile_passes(
            by_block=job.resources.compile == "blocks", autotune=job.resources.autotune
        )
    tokenizer = Tokenizer.load(job.model_input / "tokenizer")
    _check_length(job, model, progress)
    failed: Mapping[str, str] = {}
    try:
        suite = _open_suite(job, config, progress)
    except DataError as error:
        # Paths of this machine are cut out, so that equal failures give equal artifacts.
        suite, failed = None, {"core": str(error).replace(f"{job.inputs['task_data']}/", "")}
    asked = sum(len(task.items) for task in suite.tasks) if suite else 0
    # Units of progress: each split's bits per byte, each example of CORE, and all samples as one.
    progress.start(len(SPLITS) + asked + 1, unit="part")
    scores: dict[str, Interval] = {}
    losses: dict[str, npt.NDArray[np.float64]] = {}
    for done, split in enumerate(SPLITS, start=1):
        losses[split] = _row_losses(job, split, config, model, tokenizer, world)
        scores[f"{split}_bpb"] = _bits_per_byte(losses[split])
        progress.step(done, **_values(scores))
    core: CoreScore | None = None
    if suite is not None:

        def log(examples: int) -> None:
            progress.step(len(SPLITS) + examples, **_values(scores))

        core = core_metric(model, tokenizer, suite, world=world, log=log)
        failed = core.failed
        if core.core is not None:
            scores["core"] = core.core
    for label, reason in failed.items():
        progress.message(f"{label} could not be evaluated, so there is no CORE: {reason}")
    # Only the first rank samples: a few prompts are not worth distributing.
    if world.is_first:
        engine = Engine(
            model,
            tokenizer,
            on_choice=lambda choice: progress.message(f"answers: {choice}"),
        )
        texts = continuations(engine, config.prompts, max_new_tokens=config.max_new_tokens)
        write_samples(job.output / "samples.jsonl", config.prompts, texts)
        _write_losses(job, losses)
        write_scores(job, scores, suite, core, failed)
    progress.step(len(SPLITS) + asked + 1, **_values(scores))
    return metrics_of(scores) | reasons_of(failed)


def continuations(engine: Engine, prompts: tuple[str, ...], *, max_new_tokens: int) -> list[str]:
    """Return the model's greedy continuation of each prompt."""
    tokenizer = engine.tokenizer
    read = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in prompts]
    found = complete_greedily(engine, read, max_tokens=max_new_tokens)
    return [tokenizer.decode(ids) for ids in found]


def _open_suite(job: Job, config: BaseEvalConfig, progress: Progress) -> CoreSuite | None:
    directory = job.inputs["task_data"] / "core"
    if not directory.is_dir():
        progress.message("CORE skipped: the profile leaves it out (task_data.core_bundle is null)")
        return None
    suite = open_suite(directory, max_per_task=config.core_max_per_task)
    for task in suite.tasks:
        if task.num_shots >= len(task.items):
            progress.message(
                f"core: {task.label} has {len(task.items)} examples, too few for "
                f"{task.num_shots} shots each: {len(task.items) - 1} are shown"
            )
    return suite


def _check_length(job: Job, model: GPT, progress: Progress) -> None:
    """Log a message if the rows are shorter than the model's context. Raises DataError if longer:
    the loss beyond the length that the model was trained for is meaningless."""
    # Both splits have one sequence_len.
    rows = Rows.open(job.inputs["rows"], SPLITS[0])
    ours, its = rows.sequence_len, model.config.sequence_len
    if ours > its:
        raise DataError(
            f"the rows have sequence_len {ours}, the model reads {its}",
            hint="evaluate it on rows of its own length: "
            f"--set model.sequence_len={its} --set rows.sequence_len={its}",
        )
    if ours < its:
        progress.message(
            f"the rows have sequence_len {ours}, the model reads {its}: with less text before them "
            "tokens are harder to predict, so bits per byte are higher than on rows of its length"
        )


def _row_losses(
    job: Job,
    split: str,
    config: BaseEvalConfig,
    model: GPT,
    tokenizer: Tokenizer,
    world: World,
) -> npt.NDArray[np.float64]:
    rows = Rows.open(job.inputs["rows"], split)
    # Rows of another tokenizer would give a number too, and a wrong one.
    rows.check_tokenizer(tokenizer.digest())
    return row_losses(
        model,
        rows,
        tokenizer.token_bytes(),
        num_tokens=config.eval_tokens,
        batch_size=job.resources.device_batch_size,
        world=world,
    )


def _bits_per_byte(losses: npt.NDArray[np.float64]) -> Interval:
    nats = asdict(ratio_of(*losses.tolist()))  # per byte; over ln 2 these are bits
    return Interval(**{end: round(n / math.log(2), DECIMALS) for end, n in nats.items()})


def _values(scores: dict[str, Interval]) -> dict[str, float]:
    return {name: score.value for name, score in scores.items()}


def reasons_of(failed: Mapping[str, str]) -> dict[str, str]:
    """Return failures as metrics. The first is also the reason why there is no `core`."""
    reasons = {f"{label}_failed": reason for label, reason in failed.items()}
    for label, reason in list(failed.items())[:1]:
        reasons.setdefault("core_failed", f"{label}: {reason}")
    return reasons


def _write_losses(job: Job, losses: Mapping[str, npt.NDArray[np.float64]]) -> None:
    rows = [
        {"split": split, "place": i, "nats": round(n, DECIMALS_OF_ROW), "bytes": int(b)}
        for split, of_split in losses.items()
        for i, (n, b) in enumerate(of_split.T.tolist())
    ]
    write_table(job.output / "losses.parquet", rows, LOSSES)


def write_scores(
    job: Job,
    scores: dict[str, Interval],
    suite: CoreSuite | None,
    core: CoreScore | None,
    failed: Mapping[str, str],
) -> None:
    """Write scores.json, and CORE's part of it also as examples.parquet."""
    tasks = core.tasks if core else ()
    write_table(
        job.output / "examples.parquet",
        [
            {"task": task.label, "place": i, "answer": a, "gold": g, "correct": a == g}
            for task in tasks
            for i, (a, g) in enumerate(zip(task.answers, task.golds, strict=True))
        ],
        EXAMPLES,
    )
    write_json(
        job.output / "scores.json",
        {
            "format": FORMAT,
            "core": None,
            **_values(scores),
            "intervals": {name: [score.low, score.high] for name, score in scores.items()},
            "tasks": {task.label: _task_tree(task) for task in tasks},
            "failed": dict(failed),
            "suite": suite.digest if suite else None,
        },
    )


def _task_tree(task: TaskScore) -> dict[str, float]:
    return {
        "accuracy": task.accuracy.value,
        "correct": sum(task.verdicts),
        "total": len(task.golds),
        "low": task.accuracy.low,
        "high": task.accuracy.high,
        "centred": task.centred.value,
        "baseline": task.baseline,
    }
