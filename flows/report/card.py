"""The contents of the report card as numbers and text; `page` and `markdown` render it."""

import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.identity.manifest import Provenance
from flows.identity.ref import name_in, short
from flows.render.charts import Chart, Stop
from flows.render.score import Score
from flows.render.text import count, duration
from flows.report.command import Reproduction, reproduction_of
from flows.report.inputs import Artifact
from flows.report.scores import ChatScores, TaskScore, chat_scores, measured, summary, task_scores
from flows.stages import (
    BASE_EVAL,
    CHAT_MODELS,
    EVALUATORS,
    MODELS,
    PRETRAIN,
    REPORT,
    RL,
    TOKENIZER,
    Stage,
)
from nanochat_core.runtime.progress import last_by_step

ABOUT_STAGES = (
    "Midtraining teaches the base model the form of conversations, SFT (supervised fine-tuning) "
    "continues on chosen ones, and RL (reinforcement learning) rewards right answers to {task}. "
    "ChatCORE is the mean over the tasks, from guessing (0) to all right (1)."
)
MIN_VOCABULARY = 1024  # tokens: smaller ones are not compared
VOCABULARIES = {"gpt2": "GPT-2", "cl100k_base": "GPT-4"}  # compared with ours; name -> title
# Fields of a segment that are no facts of the machine, and its host name.
_UNSHOWN = {"host", "first_step", "last_step", "started", "ended", "dollars"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its answers: one of each model, or the sampled ones of a step of RL."""

    prompt: str
    answers: tuple[tuple[str, str], ...]  # (model or reward, text)
    step: int | None = None  # of RL


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage's artifact."""

    name: str
    makes: str
    fingerprint: str
    digest: str
    num_files: int
    size: int  # bytes
    seconds: float  # of work, over all attempts
    dollars: float  # of these; 0 where no price was given
    made_from: tuple[tuple[str, str], ...]  # (stage, digest)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one training stage."""

    stage: str
    steps: int
    stops: tuple[Stop, ...]
    tokens_per_second: float | None  # median over the steps
    mfu: float | None  # likewise; None where the GPU's peak is not known
    machine: str  # what the last execution ran on: "8 x NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything on the report card."""

    name: str  # of the run that built the newest of the artifacts
    date: str  # on which it did: "2026-11-29"
    machine: str  # of pretraining
    depth: int
    parameters: int
    tokens: int
    flops: float
    seconds: float  # of work, over all stages and attempts
    dollars: float
    bpb_first: float
    bpb_last: float
    rl_task: str
    chat: ChatScores
    summary: tuple[str, ...]  # the lines of `scores.summary`
    failures: tuple[str, ...]  # why a task could not be evaluated, a line each
    charts: tuple[Chart, ...]
    chat_samples: tuple[Sample, ...]
    rl_samples: tuple[Sample, ...]  # in order of step
    base_samples: tuple[Sample, ...]
    base_scores: Mapping[str, Score]
    core: Score | None  # None: not measured
    core_scores: Mapping[str, TaskScore]
    # Bytes per token on each kind of text: ours, then those of VOCABULARIES in their order, None if
    # its files were not available. Empty: ours is small, or its artifact has no such events.
    fit: Mapping[str, tuple[float | None, ...]]
    stages: tuple[StageRow, ...]
    speeds: tuple[Speed, ...]
    environment: tuple[tuple[str, str], ...]
    reproduction: Reproduction

    @property
    def bpb_fall(self) -> float:
        """The share by which validation bits per byte fell from step 0."""
        return 1 - self.bpb_last / self.bpb_first

    @property
    def best_fit(self) -> float:
        """The most bytes per token of any vocabulary on any kind of text."""
        return max(value for row in self.fit.values() for value in row if value is not None)

    @property
    def experiment(self) -> str:
        """The profile and the settings that differ from it; "" if no command makes the run."""
        command = self.reproduction.command
        return shlex.join(shlex.split(command.replace("\\\n", ""))[2:]) if command else ""

    @property
    def lead(self) -> str:
        """The size, time, cost, date and machine of the run."""
        layers = f"{self.depth} layer{'s' if self.depth > 1 else ''}"
        price = f", ${self.dollars:.2f}" if self.dollars else ""
        return (
            f"{count(self.parameters)} parameters in {layers}, trained on {count(self.tokens)} "
            f"tokens of text with {self.flops:.2e} FLOPs; {duration(self.seconds)} of work over "
            f"all stages{price}. {self.date}, {self.machine}."
        )

    @property
    def has_mfu(self) -> bool:
        """Return whether any stage ran on a GPU whose peak is known."""
        return any(speed.mfu is not None for speed in self.speeds)


def make_card(artifacts: Mapping[str, Artifact]) -> Card:
    """Return the card of one run. Raises ArtifactError if an artifact lacks what the card shows."""
    pretrain = artifacts[PRETRAIN.name]
    metrics = pretrain.manifest.provenance.metrics
    newest = max((artifacts[s.name].manifest.provenance for s in REPORT.inputs), key=_ended)
    evaluations = {m.name: artifacts[EVALUATORS[m.name].name] for m in CHAT_MODELS}
    chat = chat_scores(evaluations)
    # REPORT.inputs has every stage before the report, in the order in which they are built.
    stages = tuple(_stage_row(stage, artifacts[stage.name]) for stage in REPORT.inputs)
    base = artifacts[BASE_EVAL.name].read_json("scores.json")
    config: Any = artifacts[RL.name].manifest.preimage["config"]
    return Card(
        name=name_in(newest.run) or newest.run,
        date=time.strftime("%Y-%m-%d", time.gmtime(_ended(newest))),
        machine=_machine(pretrain.manifest.provenance),
        depth=pretrain.read_json("config.json")["model"]["depth"],
        parameters=int(pretrain.metric("parameters")),
        tokens=int(pretrain.metric("tokens")),
        flops=pretrain.metric("flops"),
        seconds=sum(stage.seconds for stage in stages),
        dollars=sum(stage.dollars for stage in stages),
        bpb_first=pretrain.metric("val_bpb_first"),
        bpb_last=pretrain.metric("val_bpb"),
        rl_task=config[RL.name]["task"],
        chat=chat,
        summary=tuple(summary(metrics, chat)),
        failures=tuple(
            f"{model.label}, {task}: {reason}"
            for model in MODELS
            for task, reason in artifacts[EVALUATORS[model.name].name]
            .read_json("scores.json")
            .get("failed", {})
            .items()
        ),
        charts=_charts(artifacts),
        chat_samples=_chat_samples(artifacts),
        rl_samples=_rl_samples(artifacts[RL.name]),
        base_samples=tuple(
            Sample(prompt=prompt, answers=((PRETRAIN.label, text),))
            for prompt, text in artifacts[BASE_EVAL.name].samples()
        ),
        base_scores={name: score for name in base if (score := measured(base, name))},
        core=measured(base, "core"),
        core_scores=task_scores(base),
        fit=_fit(artifacts[TOKENIZER.name]),
        stages=stages,
        speeds=tuple(_speed(stage.name, artifacts[stage.name]) for stage in MODELS),
        environment=_environment(pretrain.manifest.provenance),
        reproduction=reproduction_of([artifacts[s.name].manifest for s in REPORT.inputs]),
    )


def _charts(artifacts: Mapping[str, Artifact]) -> tuple[Chart, ...]:
    charts = (
        Chart(
            quantity=quantity,
            curves=[artifacts[stage.name].series(quantity.kind, quantity.name)],
            stops=artifacts[stage.name].stops(),
        )
        for stage in REPORT.inputs
        for quantity in stage.curves
    )
    return tuple(chart for chart in charts if any(chart.curves))


def _chat_samples(artifacts: Mapping[str, Artifact]) -> tuple[Sample, ...]:
    """Return prompts in the order of the first model, each with every model's answer."""
    # Evaluations may have different prompts, so each answer is looked up by its prompt.
    answers = {
        model.label: dict(artifacts[EVALUATORS[model.name].name].samples()) for model in CHAT_MODELS
    }
    prompts = dict.fromkeys(prompt for by_prompt in answers.values() for prompt in by_prompt)
    return tuple(
        Sample(
            prompt=prompt,
            answers=tuple(
                (label, by_prompt[prompt])
                for label, by_prompt in answers.items()
                if prompt in by_prompt
            ),
        )
        for prompt in prompts
    )


def _rl_samples(rl: Artifact) -> tuple[Sample, ...]:
    """Return a question of the first, the middle and the last step that has samples."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in rl.lines("samples.jsonl"):
        by_step.setdefault(int(line["step"]), []).append(line)
    steps = sorted(by_step)
    # A set: with one or two steps some of the three are the same.
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return tuple(
        Sample(
            step=step,
            prompt=str(by_step[step][0]["prompt"]),
            answers=tuple(
                (f"reward {line['reward']:g}", str(line["text"])) for line in by_step[step]
            ),
        )
        for step in shown
    )


def _fit(tokenizer: Artifact) -> dict[str, tuple[float | None, ...]]:
    if tokenizer.manifest.provenance.metrics.get("vocab_size", MIN_VOCABULARY) < MIN_VOCABULARY:
        return {}
    # The tokenizer logs one event at step 0: "code" is ours, "code/gpt2" that of GPT-2.
    values = last_by_step(iter(tokenizer.events), "eval").get(0, {})
    return {
        name: (values[name], *(values.get(f"{name}/{v}") for v in VOCABULARIES))
        for name in values
        if "/" not in name
    }


def _stage_row(stage: Stage, artifact: Artifact) -> StageRow:
    manifest = artifact.manifest
    segments = manifest.provenance.segments
    return StageRow(
        name=stage.name,
        makes=stage.makes,
        fingerprint=short(manifest.fingerprint),
        digest=short(manifest.digest),
        num_files=len(manifest.files),
        size=sum(file.size for file in manifest.files),
        # Over all executions of the job, also those that were stopped.
        seconds=sum(s.get("ended", 0) - s.get("started", 0) for s in segments),
        dollars=sum(s.get("dollars", 0) for s in segments),
        made_from=tuple(
            (source.name, short(manifest.inputs[source.name].digest)) for source in stage.inputs
        ),
    )


def _speed(stage: str, artifact: Artifact) -> Speed:
    steps = [event["step"] for event in artifact.events if event["kind"] == "step"]
    return Speed(
        stage=stage,
        steps=max(steps, default=0),
        stops=tuple(artifact.stops()),
        tokens_per_second=_median(artifact, "tokens_per_second"),
        mfu=_median(artifact, "mfu"),
        machine=_machine(artifact.manifest.provenance),
    )


def _median(artifact: Artifact, name: str) -> float | None:
    # The median ignores the first steps, which compile kernels, and pauses for checkpoints.
    values = [value for _, value in artifact.series("step", name)]
    return statistics.median(values) if values else None


def _last_segment(provenance: Provenance) -> Mapping[str, Any]:
    # An imported or accepted artifact may have no segments.
    return provenance.segments[-1] if provenance.segments else {}


def _ended(provenance: Provenance) -> float:
    """Return when the last execution of the job ended, in seconds since 1970; 0 if not recorded."""
    return _last_segment(provenance).get("ended", 0.0)


def _machine(provenance: Provenance) -> str:
    """Return the number of processes and their device."""
    segment = _last_segment(provenance)
    # The stage's own name for the device ("NVIDIA H100 80GB HBM3") is better than "cuda".
    device = str(provenance.metrics.get("device") or segment.get("device") or "not known")
    if device == "cpu" and "threads" in segment:
        device = f"{provenance.versions.get('processor', 'CPU')}, {segment['threads']} threads"
    processes = segment.get("processes", 1)
    return f"{processes} x {device}" if processes > 1 else device


def _environment(provenance: Provenance) -> tuple[tuple[str, str], ...]:
    """Return facts about the machine of the last segment, and the git commit."""
    segment = _last_segment(provenance)
    shown = {name: segment[name] for name in sorted(segment) if name not in _UNSHOWN}
    metrics = provenance.metrics
    names = ("device", "attention", "compile", "determinism")
    shown |= {name: metrics[name] for name in names if name in metrics}
    if "peak_memory_gb" in metrics:
        shown["peak_memory"] = f"{metrics['peak_memory_gb']} GB"
    facts = [(name.replace("_", " "), _word(value)) for name, value in shown.items()]
    return (*facts, ("git commit", provenance.git_commit)) if provenance.git_commit else (*facts,)


def _word(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"
