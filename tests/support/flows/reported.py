"""The artifacts of a finished run, as small as they can be, and the report card made of them."""

import html
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from flows.identity.fingerprint import canonical_config
from flows.identity.manifest import File, Manifest
from flows.identity.work import measure_work
from flows.profiles import open_profile
from flows.report.stage import run
from flows.stages import REPORT, Stage
from infra.storage.files import sha256_of
from nanochat_core.config import RunConfig
from tests.support.flows import shelf
from tests.support.flows.measured import parquet
from tests.support.small_job import small_job

Card: TypeAlias = tuple[str, str]
METRICS = {
    "pretrain": {
        "val_bpb_first": 3.2,
        "val_bpb": 1.6,
        "parameters": 4_812_345,
        "tokens": 12_300_000,
        "flops": 3.1e14,
        "device": "NVIDIA H100 80GB HBM3",
        "attention": "sdpa",
        "compile": False,
        "peak_memory_gb": 61.25,
    }
}

FIT = {
    "held-out": 4.31,
    "held-out/cl100k_base": 4.62,
    "russian": 1.9,
    "russian/gpt2": 1.69,
    "russian/cl100k_base": 3.83,
}


def make_score(correct: int, total: int) -> dict[str, float]:
    share = correct / total
    bounds = {"low": max(0.0, share - 0.05), "high": min(1.0, share + 0.05)}
    return {"accuracy": share, "correct": correct, "total": total, **bounds}


CORRECT = {"chat_eval_midtrain": 20, "chat_eval_sft": 42, "chat_eval_rl": 122}  # of 200 sums
BASE_SCORES = {
    "format": 2,
    "core": 0.2,
    "val_bpb": 1.6,
    "intervals": {"core": [0.15, 0.25], "val_bpb": [1.55, 1.65]},
    "tasks": {
        "hellaswag": {**make_score(70, 200), "centred": 0.1333},
        "boolq": {**make_score(20, 100), "centred": -0.6},
    },
}
# The one execution that made an artifact.
SEGMENT = {
    **{"first_step": 0, "last_step": 40, "started": 10.0, "ended": 75.5, "host": "secret-host"},
    **{"device": "cpu", "torch": "2.13.0+cpu", "dollars": 0.25},
}


def make_report(tmp_path: Path, **values: Any) -> Card:
    return run_report(tmp_path, make_inputs(tmp_path / "store", **values))


def run_report(directory: Path, inputs: dict[str, Path]) -> Card:
    """Run the stage on `inputs`; returns the page and the markdown."""
    job = small_job(directory, stage="report", entry=REPORT.entry, inputs=inputs)
    job.output.mkdir(parents=True)
    run(job)
    page, text = ((job.output / f"report.{kind}").read_text() for kind in ("html", "md"))
    return page, text


def plain(page: str) -> str:
    """Return the text of a page: without its tags."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def make_inputs(
    store: Path,
    *,
    answer: str = "It has 5 letters.",
    run: RunConfig | None = None,
    vocab_size: int = 65_536,
) -> dict[str, Path]:
    """Write the files of every stage; `run` has the settings, by default those of tiny."""
    run = run or open_profile("tiny").run
    made: dict[str, Manifest] = {}
    for stage in REPORT.inputs:
        files = store / stage.name / "files"
        files.mkdir(parents=True)
        for name, text in make_files(stage.name, answer).items():
            (files / name).write_text(text, encoding="utf-8")
        if stage.name.startswith("chat_eval_"):
            (files / "examples.parquet").write_bytes(make_examples(files))
        write_events(files.parent / "logs" / "events.jsonl", stage.name)
        measured = {**METRICS, "tokenizer": {"vocab_size": vocab_size}}.get(stage.name, {})
        made[stage.name] = make_manifest(stage, files, made, run, measured)
        (files.parent / "manifest.json").write_bytes(made[stage.name].to_json())
    return {name: store / name / "files" for name in made}


def make_files(stage: str, answer: str) -> dict[str, str]:
    if stage.startswith("chat_eval_"):
        correct = CORRECT[stage]
        scores = {
            "tasks": {
                "arithmetic": make_score(correct, 200),
                "spelling": make_score(70 if stage == "chat_eval_rl" else 90, 100),
            },
            "turns": {"conversation: small talk": make_score(80, 100)},
            "chatcore": correct / 200,
            "failed": {},
            "intervals": {"chatcore": [correct / 400, correct / 100]},
        }
        samples = make_samples(("Spell apple", answer), ("Hello", "Hi!\u2028"))
        return {"scores.json": json.dumps(scores), "samples.jsonl": samples}
    if stage == "base_eval":
        samples = make_samples(("The capital of France is", answer))
        return {"scores.json": json.dumps(BASE_SCORES), "samples.jsonl": samples}
    if stage == "task_data":
        datasets = {
            "arithmetic": {"kind": "generated", "test": 200, "overlap": 0},
            "letters": {"kind": "own", "test": 100, "overlap": 0},
            "spelling": {"kind": "generated", "test": 100, "overlap": 0},
        }
        return {"task_data.json": json.dumps({"datasets": datasets})}
    files = {"config.json": json.dumps({"model": {"depth": 3}, "of": stage})}
    return files | ({"samples.jsonl": make_paid_samples(answer)} if stage == "rl" else {})


def make_examples(files: Path) -> bytes:
    """As many right answers as the scores say, to the first questions of each task."""
    scores = json.loads((files / "scores.json").read_text())["tasks"]
    return parquet(
        [
            {"task": task, "place": i, "answer": "", "correct": i < score["correct"]}
            for task, score in scores.items()
            for i in range(score["total"])
        ]
    )


def make_samples(*pairs: tuple[str, str]) -> str:
    lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in pairs]
    return "\n".join(lines) + "\n"


def make_paid_samples(answer: str) -> str:
    rewards = {1: 0.0, 3: 1.0, 5: 1.0, 7: 0.0, 9: 0.5}
    lines = [
        json.dumps({"step": step, "prompt": f"2 apples and 3 at step {step}?", **said})
        for step, reward in rewards.items()
        for said in ({"text": answer, "reward": 0.0}, {"text": f"paid {step}", "reward": reward})
    ]
    return "\n".join(lines) + "\n"


def write_events(path: Path, stage: str) -> None:
    """Curves that fall with some noise; pretraining was stopped twice and repeats a few steps."""
    noise = random.Random(stage)
    events: list[dict[str, object]] = []
    for start in (0, 12, 20) if stage == "pretrain" else (0,):
        began = {"kind": "start", "unit": "step", "step": start, "total": 40}
        events.append(began | {"resumed": start > 0})
        for step in range(start, 40):
            falling = 8 / (1 + step / 9) + noise.random() / 9
            values = {"loss": falling, "tokens_per_second": 50_000.0, "reward": 1 / falling}
            values |= {"mfu": 0.41} if stage == "pretrain" else {}
            events.append({"kind": "step", "step": step + 1, "total": 40, "values": values})
        measured = FIT if stage == "tokenizer" else {"val_bpb": 3.2 - start / 20, "pass_at_1": 0.2}
        events.append({"kind": "eval", "step": start, "values": measured})
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"time": 0.0, **e}) + "\n" for e in events))


def make_manifest(
    stage: Stage, files: Path, made: dict[str, Manifest], run: RunConfig, metrics: dict[str, Any]
) -> Manifest:
    """The manifest of a stage whose files and log are there."""
    manifest = shelf.make_manifest(
        stage.name,
        config=canonical_config(stage, run),
        files={path.name: path.read_bytes() for path in files.iterdir()},
        inputs={source.name: made[source.name] for source in stage.inputs},
        run="mine-20261121t055338z-1a2b",
        git_commit="c2132f5",
        metrics=metrics,
        segments=({**SEGMENT, "processes": 8 if stage.name == "pretrain" else 1},),
        work=measure_work(stage, run),
    )
    log = files.parent / "logs" / "events.jsonl"
    size, sha256 = log.stat().st_size, sha256_of(log)
    written = File(path=log.name, size=size, sha256=sha256, key="logs/events.jsonl")
    return replace(manifest, logs=(written,))
