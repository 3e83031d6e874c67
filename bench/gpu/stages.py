"""Stages by the product's own launcher and workers, on a machine without Prefect.

    python -m bench.gpu.stages demo --device cuda
    python -m bench.gpu.stages resume --device cuda --depth 4 --steps 60

`demo` runs every stage of profile `tiny` but the report. `resume` trains four times on the same
rows with deterministic kernels: undisturbed, again, with a worker that is killed, and with one that
is asked to stop; the last two resume, and all models have to be the same, to the bit.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.report import needs_gpu, result, say
from bench.our_train import make_job
from bench.train import Case
from flows.profiles import make_placement, open_profile
from flows.stages import STAGES
from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from infra.launch.watchdog import heartbeats_of
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import read_heartbeats
from nanochat_core.section import Section

SIGNALS = {"undisturbed": None, "again": None, "killed": signal.SIGKILL, "stopped": signal.SIGTERM}
SAVE_EVERY = 3  # steps: a worker that is killed has a checkpoint to resume from
# Of a dry demo: our documentation for text, few steps, and the stages up to the first model.
DOCS = Path(__file__).resolve().parents[2] / "docs"
SMALL = ("pretrain.num_steps=2", "pretrain.eval_tokens=256")
SMALL_LAST = "pretrain"


def main() -> None:
    """Run what is asked for; exit 1 if the models of `resume` differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("demo", "resume"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of `resume`")
    parser.add_argument("--ways", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--attention", default="auto", help="of `resume`")
    parser.add_argument("--compile", action="store_true", help="the model of `resume`")
    parser.add_argument("--small", action="store_true", help="of `demo`: the first stages, little")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stages-") as directory:
        if options.what == "demo":
            demo(Path(directory), options)
        else:
            resume(Path(directory), options)


def demo(work: Path, options: argparse.Namespace) -> None:
    """Run the stages one after the other; report the seconds of each, and its metrics."""
    overrides = [*SMALL, *small_text(work / "text")] if options.small else []
    profile = open_profile("tiny", depth=options.depth, overrides=overrides)
    gpus = int(options.device == "cuda")
    # So small a model trains for seconds: compiling it would take minutes.
    resources = make_placement(
        profile.pace, home=work, gpus=gpus, settings=["compile=false"]
    ).resources
    outputs: dict[str, Path] = {}
    began = time.perf_counter()
    for stage in STAGES:
        if stage.name == "report":
            break
        sections = {name: getattr(profile.run, name) for name in stage.config}
        job = Job(
            directory=work / stage.name,
            stage=stage.name,
            entry=stage.entry,
            fingerprint="bench",
            config={n: s.tree() if isinstance(s, Section) else s for n, s in sections.items()},
            inputs={source.name: outputs[source.name] for source in stage.inputs},
            resources=resources,
        )
        outputs[stage.name] = job.output
        metrics, seconds = run_stage(job)
        result(f"stage {stage.name}", seconds=seconds, metrics=metrics)
        say(f"{stage.name}: {seconds} s")
        if options.small and stage.name == SMALL_LAST:
            break
    say(f"all stages: {time.perf_counter() - began:.0f} s")
    if not gpus:
        needs_gpu("the stages on a GPU")


def small_text(directory: Path) -> tuple[str, ...]:
    """Write our documentation as a text; return the settings that choose it, and little of it."""
    directory.mkdir()
    for path in DOCS.rglob("*.md"):
        (directory / f"{path.stem}.txt").write_text(path.read_text())
    return (
        *("shards.source=local", f"shards.path={directory}", "shards.num_shards=2"),
        "tokenizer.max_chars=200000",
    )


def run_stage(job: Job) -> tuple[dict[str, Any], float]:
    """Run a stage's worker; return its metrics and the seconds. What a worker logs goes to stderr.

    Raises JobFailed with the end of the worker's log.
    """
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    began = time.perf_counter()
    try:
        metrics = run_job(job, processes=1, on_event=log).metrics
    except JobFailed as error:
        print(error.log_tail, file=sys.stderr)
        raise
    return metrics, round(time.perf_counter() - began, 1)


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
