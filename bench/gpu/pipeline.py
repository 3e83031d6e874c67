"""Stages by the product's own launcher and workers, on a machine without Prefect.

    python -m bench.gpu.pipeline training --device cuda --depth 10 --steps 700
    python -m bench.gpu.pipeline resume --device cuda --depth 4 --steps 60 --compile

`training` makes a chat model: text of this machine, pretraining, midtraining, SFT that is killed
once and resumes, RL, the evaluations, and a conversation of five turns. Before its turn it makes
the rows and compiles. `resume` trains four times on the same rows with deterministic kernels:
undisturbed, again, with a worker that is killed, and with one that is asked to stop; the last two
resume, and all models have to be the same, to the bit.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.report import needs_gpu, result, say, wait_turn
from bench.our_train import make_job, write_inputs
from bench.package_text import package_text, small_text
from bench.train import Case
from flows.cli.use.chat_session import ChatSession, Sampling
from flows.datasets import text_snapshot, with_snapshots
from flows.profiles import Pace, make_placement, open_profile
from flows.stages import stage_named
from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from infra.launch.watchdog import heartbeats_of
from nanochat_core.config import MixtureEntry, RunConfig, ShardsConfig
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import read_heartbeats
from nanochat_core.scaling import dataset, run_for_depth
from nanochat_core.section import Section

SIGNALS = {"undisturbed": None, "again": None, "killed": signal.SIGKILL, "stopped": signal.SIGTERM}
SAVE_EVERY = 3  # steps: a worker that is killed has a checkpoint to resume from
BROUGHT = (
    Path(__file__).resolve().parents[2] / ".text"
)  # a text for `training`, in any format of `shards.source=local`
CHARACTERS = 150_000_000  # else of the sources of installed packages, beside their documentation
DATA = ("shards", "task_data", "tokenizer", "tokens", "rows")
# In order of value: what the hard end cuts off is worth the least.
TRAINING = ("pretrain", "midtrain", "sft", "chat_eval_sft", "rl", "chat_eval_rl", "base_eval")
TALK = (
    "Hello! Who are you?",
    "How do you spell the word garden?",
    "What is 17 + 25?",
    "Is 8 + 9 = 16 right?",
    "What is the capital of the planet Zorblax?",
)
KILLED = "sft"  # once, when it has saved: a stage that starts quickly, as nothing is compiled
SAVES, SAVES_SMALL = 20, 2  # its steps from one checkpoint to the next
LOSSES = 200  # of a curve, evenly spread


def main() -> None:
    """Run what is asked for; exit 1 if the models of `resume` differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("training", "resume"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="of pretraining")
    parser.add_argument("--ways", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--attention", default="auto", help="of `resume`")
    parser.add_argument("--compile", action="store_true", help="the model of `resume`")
    parser.add_argument("--small", action="store_true", help="of `training`: little of everything")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stages-") as directory:
        if options.what == "training":
            training(Path(directory), options)
        else:
            resume(Path(directory), options)


def training(work: Path, options: argparse.Namespace) -> None:
    """Make a chat model by every stage; report the seconds and the metrics of each."""
    text = work / "text"
    if options.small:
        small_text(text)
    elif BROUGHT.is_dir():
        text = BROUGHT
    else:
        package_text(text, sources=CHARACTERS)
    stages = Stages(work, make_run(options, text), options)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(compile_pretraining, stages)
        for name in DATA:
            stages.make(name)
        compiled.result()
    wait_turn()
    for name in TRAINING:
        job = stages.job(name)
        if name == KILLED:
            interrupt(job, signal.SIGKILL, at=SAVES_SMALL if options.small else SAVES)
        stages.make(name, job)
        if name in ("pretrain", KILLED):
            report_curve(job)
        if name == "sft":
            talk(job.output, options.device)
    if options.device == "cpu":
        needs_gpu("the stages on a GPU")


def compile_pretraining(stages: "Stages") -> None:
    """Take one step of pretraining on random rows: the compiler's cache has its kernels then."""
    work, model = stages.work / "compiled", stages.run.model
    write_inputs(work, model.sequence_len, model.vocab_size)
    inputs = {name: work / name for name in ("rows", "tokenizer")}
    began = time.perf_counter()
    try:
        run_job(
            Stages(work, stages.run, stages.options, inputs).job("pretrain"),
            processes=1,
            on_event=log,
            steps=1,
        )
    except StageInterrupted:
        say(f"pretrain: compiled after {time.perf_counter() - began:.0f} s")


def make_run(options: argparse.Namespace, text: Path) -> RunConfig:
    """Return a run of the recipe at this depth, on text and conversations that need no network."""
    on_gpu = options.device == "cuda"
    shape = {"sequence_len": 256, "vocab_size": 512} if options.small else {}
    run = run_for_depth(options.depth, precision="bf16" if on_gpu else "fp32", **shape)
    tiny = open_profile("tiny", snapshots=False).run
    # Conversations, questions, examples of RL a step, evaluated questions.
    talks, sums, group, asked = (80, 8, 2, 4) if options.small else (100_000, 4_000, 16, 200)
    batch = 256 if options.small else 2**17
    chat_batch = 256 if options.small else 2**15
    shards = ShardsConfig(
        source="local", path=str(text), num_shards=2 if options.small else 16,
        snapshot=(), revision=None,
    )  # fmt: skip
    data = dataclasses.replace(
        run.task_data,
        datasets=(
            dataset("conversation", num_train=talks, num_test=asked),
            dataset("spelling", grade=3, num_train=8, num_test=asked),
            dataset("arithmetic", num_train=sums, num_test=asked),
        ),
        core_bundle=None,
    )

    def mixture(first: int) -> tuple[MixtureEntry, ...]:
        half = {"conversation": talks // 2, "arithmetic": sums // 2}
        return tuple(
            MixtureEntry(task=name, num_examples=count, epochs=1, skip=first * count)
            for name, count in half.items()
        )

    chat = {"total_batch_size": chat_batch, "eval_examples": asked}
    return dataclasses.replace(
        run,
        shards=dataclasses.replace(shards, snapshot=text_snapshot(shards)),
        task_data=with_snapshots(data),
        tokenizer=dataclasses.replace(run.tokenizer, max_chars=200_000 if options.small else 10**8),
        pretrain=dataclasses.replace(
            run.pretrain,
            num_steps=options.steps,
            total_batch_size=batch,
            eval_tokens=8 * batch,
            # The recipe's rates are for its own batch.
            lr_fraction=math.sqrt(batch / run.pretrain.total_batch_size),
        ),
        base_eval=dataclasses.replace(tiny.base_eval, eval_tokens=8 * batch),
        midtrain=dataclasses.replace(run.midtrain, mixture=mixture(0), **chat),
        sft=dataclasses.replace(run.sft, mixture=mixture(1), **chat),
        rl=dataclasses.replace(
            tiny.rl,
            num_steps=1 if options.small else 20,
            examples_per_step=group,
            samples_per_example=group,
            eval_examples=asked,
        ),
        chat_eval=dataclasses.replace(
            tiny.chat_eval,
            tasks=tuple(dataclasses.replace(t, max_examples=asked) for t in tiny.chat_eval.tasks),
        ),
    )


@dataclass(frozen=True)
class Stages:
    """The stages of one run that were made so far, in a directory."""

    work: Path
    run: RunConfig
    options: argparse.Namespace
    outputs: dict[str, Path] = field(default_factory=dict[str, Path])

    def job(self, name: str) -> Job:
        """Return a stage's job, with its directory."""
        stage, on_gpu = stage_named(name), self.options.device == "cuda"
        sections = {section: getattr(self.run, section) for section in stage.config}
        pace = Pace(
            device_batch_size=1 if self.options.small else 16,
            save_every_seconds=10.0,
            eval_every_steps=0,
            max_gpus=1,
            compile=name == "pretrain",  # the others are too short to be worth it
        )
        saves = SAVES_SMALL if self.options.small else SAVES
        settings = [f"save_every_steps={saves}"] if name == KILLED else []
        job = Job(
            directory=self.work / name,
            stage=name,
            entry=stage.entry,
            fingerprint="bench",
            config={n: s.tree() if isinstance(s, Section) else s for n, s in sections.items()},
            inputs={source.name: self.outputs[source.name] for source in stage.inputs},
            resources=make_placement(
                pace, home=self.work, gpus=int(on_gpu), settings=settings
            ).resources,
        )
        job.output.mkdir(parents=True)
        job.checkpoints.mkdir()
        return job

    def make(self, name: str, job: Job | None = None) -> None:
        """Run a stage's worker; report its seconds, metrics, and the runners of its answers."""
        job = job or self.job(name)
        metrics, seconds, runners = run_stage(job)
        self.outputs[name] = job.output
        result(f"stage {name}", seconds=seconds, metrics=metrics, answers=runners)
        shown = [f"{k} {v:.4g}" for k, v in metrics.items() if isinstance(v, float)]
        say(", ".join([f"{name}: {seconds} s", *shown[:6], *runners[:1]]))


def run_stage(job: Job) -> tuple[dict[str, Any], float, list[str]]:
    """Run a stage's worker; return its metrics, the seconds, and the runners of its answers.

    Raises JobFailed with the end of the worker's log, which goes to stderr like all it logs.
    """
    began = time.perf_counter()
    choices: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        log(event)
        if event["kind"] == "message" and event["text"].startswith("answers: "):
            choices.append(event["text"].removeprefix("answers: "))

    try:
        metrics = run_job(job, processes=1, on_event=on_event).metrics
    except JobFailed as error:
        print(error.log_tail, file=sys.stderr)
        raise
    return metrics, round(time.perf_counter() - began, 1), choices


def report_curve(job: Job) -> None:
    """Report the losses of a stage; a step that was done again after a kill has two."""
    events = map(json.loads, job.events.read_text().splitlines())
    steps = [(e["step"], e["values"]["loss"]) for e in events if e["kind"] == "step"]
    again = len(steps) - len(dict(steps))
    every = max(1, len(steps) // LOSSES)
    result(f"curve {job.stage}", losses=[*steps[::every], steps[-1]], steps_done_again=again)
    say(f"{job.stage}: {steps[-1][0]} steps, {again} of them done again, loss {steps[-1][1]:.4f}")


def talk(model: Path, device: str) -> None:
    """Report a conversation of five turns."""
    sampling = Sampling(temperature=0.6, top_k=50, max_tokens=128, seed=42)
    session = ChatSession.open(model, sampling=sampling, device=device)
    turns = [{"question": text, "answer": session.ask(text)} for text in TALK]
    result("conversation", turns=turns)
    for turn in turns:
        say(f"> {turn['question']}")
        say(turn["answer"].replace("\n", " ")[:300])


def log(event: dict[str, Any]) -> None:
    """Print a message of a worker."""
    if event["kind"] == "message":
        print(event["text"], file=sys.stderr, flush=True)


def resume(work: Path, options: argparse.Namespace) -> None:
    """Train the same model several times at once, some of them with an interruption."""
    with ThreadPoolExecutor(len(options.ways)) as pool:
        trained = list(pool.map(lambda name: train(work / name, name, options), options.ways))
        models = {name: digest for name, (digest, _) in zip(options.ways, trained, strict=True)}
    _, expected = trained[0]
    for name, (_, losses) in zip(options.ways, trained, strict=True):
        differ = [step for step in sorted(expected) if losses.get(step) != expected[step]]
        say(f"{name}: {len(losses)} losses, " + (f"others from {differ[0]}" if differ else "equal"))
    same = len(set(models.values())) == 1
    result("models", sha256=models, same=same)
    for name, digest in models.items():
        say(f"{name}: {digest[:16]}")
    if options.device == "cpu":
        needs_gpu("resuming on a GPU")
    sys.exit(0 if same else "error: the models differ")


def train(
    directory: Path, name: str, options: argparse.Namespace
) -> tuple[str, dict[int, dict[str, float]]]:
    """Train a model, interrupted halfway as `name` says.

    Return the sha256 of its weights, and the loss of each step.
    """
    on_gpu = options.device == "cuda"
    case = Case(
        name=name,
        depth=options.depth,
        device=options.device,
        precision="bf16" if on_gpu else "fp32",
        rows=8 if on_gpu else 1,
        accumulate=1,
        sequence_len=1024 if on_gpu else 32,
        vocab_size=4096 if on_gpu else 512,
        attention=options.attention,
        compile=options.compile,
    )
    directory.mkdir()
    job = make_job(
        asdict(case) | {"threads": 1},
        directory,
        num_steps=options.steps,
        determinism="strict" if on_gpu else "default",  # a CPU repeats itself in any case
        save_every_steps=SAVE_EVERY,
    )
    interruption = SIGNALS[name]
    if interruption is not None:
        interrupt(job, interruption, at=options.steps // 2)
    run_job(job, processes=1, on_event=log)
    events = map(json.loads, job.events.read_text().splitlines())
    losses = {e["step"]: e["values"]["loss"] for e in events if e["kind"] == "step"}
    return hashlib.sha256((job.output / "model.safetensors").read_bytes()).hexdigest(), losses


def interrupt(job: Job, sent: signal.Signals, *, at: int) -> None:
    """Run a job and send its worker a signal once it is `at` a step. Raises if it ended well."""
    is_sent = False

    def on_event(event: dict[str, Any]) -> None:
        nonlocal is_sent
        log(event)
        if event["kind"] == "step" and event["step"] >= at and not is_sent:
            is_sent = True
            for heartbeat in read_heartbeats(heartbeats_of(job)):
                os.kill(heartbeat.pid, sent)

    try:
        run_job(job, processes=1, on_event=on_event)
    except (JobFailed, StageInterrupted):
        return
    raise RuntimeError(f"the worker ended before {sent.name} could reach it")


if __name__ == "__main__":
    main()
