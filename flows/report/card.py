"""The contents of the report card; `page` renders it."""

import shlex
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.identity.manifest import Provenance
from flows.identity.ref import name_in, short
from flows.render.charts import Chart
from flows.render.text import (
    count,
    duration,
    escaped,
    listed,
    money,
    percent,
    size,
    visible,
)
from flows.report.command import Reproduction, reproduction_of
from flows.report.inputs import Artifact
from flows.report.rows import CardCell, Sample, Section, cells
from flows.report.scores import chat_scores, chat_section, core_section, measured, summary
from flows.stages import (
    BASE_EVAL,
    CHAT_MODELS,
    EVALUATORS,
    MODELS,
    PRETRAIN,
    REPORT,
    RL,
    TASK_DATA,
    TOKENIZER,
    Stage,
)
from nanochat_core.runtime.progress import last_by_step

MIN_VOCABULARY = 1024  # tokens: smaller ones are not compared
VOCABULARIES = {"gpt2": "GPT-2", "cl100k_base": "GPT-4"}  # compared with ours; name -> title
# Fields of a segment that are no facts of the machine, and its host name.
_UNSHOWN = {"host", "first_step", "last_step", "started", "ended", "dollars"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything on the report card."""

    name: str  # of the run that built the newest of the artifacts
    lead: str
    experiment: str  # the profile and the settings that differ; "" if no command makes the run
    tiles: tuple[tuple[str, CardCell], ...]
    summary: tuple[str, ...]  # the lines of `scores.summary`; the last one says what got worse
    sections: tuple[Section, ...]
    metrics: Mapping[str, float]  # of the report's artifact


def make_card(artifacts: Mapping[str, Artifact]) -> Card:
    """Return the card of one run. Raises ArtifactError if an artifact lacks what the card shows."""
    pretrain, base = artifacts[PRETRAIN.name], artifacts[BASE_EVAL.name]
    newest = max((artifacts[s.name].manifest.provenance for s in REPORT.inputs), key=_ended)
    chat = chat_scores({m.name: artifacts[EVALUATORS[m.name].name] for m in CHAT_MODELS})
    first, last = pretrain.metric("val_bpb_first"), pretrain.metric("val_bpb")
    fall = 1 - last / first
    note = f"val_bpb, {percent(fall)} below {first:.4f} at step 0"
    command = reproduction_of([artifacts[s.name].manifest for s in REPORT.inputs])
    sections = (
        chat_section(
            chat,
            rl_task=_rl_task(artifacts[RL.name]),
            data=artifacts[TASK_DATA.name],
            failures=_failures(artifacts),
        ),
        core_section(base.read_json("scores.json")),
        _learning(artifacts),
        Section(title="The same prompts, model by model", samples=_chat_samples(artifacts)),
        _rewarded(artifacts[RL.name]),
        _base_samples(base),
        _vocabulary(artifacts[TOKENIZER.name]),
        _stages(artifacts),
        _lineage(artifacts),
        _speed(artifacts),
        _reproduce(command),
    )
    return Card(
        name=visible(name_in(newest.run) or newest.run),
        lead=_lead(artifacts, time.strftime("%Y-%m-%d", time.gmtime(_ended(newest)))),
        experiment=visible(_experiment(command.command)) if command.command else "",
        tiles=(
            (
                "Validation bits per byte",
                CardCell(f"{last:.4f}", (note,), tone="better" if fall > 0 else ""),
            ),
            *(
                (f"ChatCORE after {m.label}", c)
                for m, c in zip(chat.models, chat.chatcore_row, strict=True)
            ),
        ),
        summary=tuple(summary(pretrain.manifest.provenance.metrics, chat)),
        sections=tuple(section for section in sections if section),
        metrics={"val_bpb": last, "val_bpb_fall": fall},
    )


def _lead(artifacts: Mapping[str, Artifact], date: str) -> str:
    """Return the size, time, cost, date and machine of the run."""
    pretrain = artifacts[PRETRAIN.name]
    depth = pretrain.read_json("config.json")["model"]["depth"]
    layers = f"{depth} layer{'s' if depth > 1 else ''}"
    made = [artifact.manifest.provenance for artifact in artifacts.values()]
    dollars = sum(each.dollars for each in made)
    price = f", ${dollars:.2f}" if dollars else ""
    return (
        f"{count(pretrain.metric('parameters'))} parameters in {layers}, trained on "
        f"{count(pretrain.metric('tokens'))} tokens of text with {pretrain.metric('flops'):.2e} "
        f"FLOPs; {duration(sum(each.seconds for each in made))} of work over all stages"
        f"{price}. {date}, {_machine(pretrain.manifest.provenance)}."
    )


def _failures(artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return why a task could not be evaluated, a line each."""
    return [
        f"{model.label}, {task}: {reason}"
        for model in MODELS
        for task, reason in artifacts[EVALUATORS[model.name].name]
        .read_json("scores.json")
        .get("failed", {})
        .items()
    ]


def _rl_task(rl: Artifact) -> str:
    config: Any = rl.manifest.preimage["config"]
    return config[RL.name]["task"]


def _experiment(command: str) -> str:
    """Return the profile and settings of a command `nanochat run`, on one line."""
    return shlex.join(shlex.split(command.replace("\\\n", ""))[2:])


def _learning(artifacts: Mapping[str, Artifact]) -> Section:
    charts = (
        Chart(
            quantity=quantity,
            curves=[artifacts[stage.name].series(quantity.kind, quantity.name)],
            stops=artifacts[stage.name].stops(),
        )
        for stage in REPORT.inputs
        for quantity in stage.curves
    )
    return Section(
        title="Learning",
        notes=(
            "A faint line is what was measured, a strong one its moving average; of a loss they "
            "begin after the first twentieth of the steps, where it falls most. A dashed line is "
            "where a job resumed after a stop; a dotted one is where it had stopped, if steps were "
            "repeated.",
        ),
        charts=tuple(chart for chart in charts if any(chart.curves)),
    )


def _chat_samples(artifacts: Mapping[str, Artifact]) -> tuple[Sample, ...]:
    """Return prompts in the order of the first model, each with every model's answer."""
    # Evaluations may have different prompts, so each answer is looked up by its prompt.
    answers = {
        model.label: dict(artifacts[EVALUATORS[model.name].name].samples()) for model in CHAT_MODELS
    }
    prompts = dict.fromkeys(prompt for by_prompt in answers.values() for prompt in by_prompt)
    return tuple(
        Sample(
            prompt=visible(prompt),
            answers=tuple(
                (label, visible(by_prompt[prompt]))
                for label, by_prompt in answers.items()
                if prompt in by_prompt
            ),
        )
        for prompt in prompts
    )


def _rewarded(rl: Artifact) -> Section | None:
    """Return a question of the first, the middle and the last step that has samples."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in rl.lines("samples.jsonl"):
        by_step.setdefault(int(line["step"]), []).append(line)
    if not by_step:
        return None
    steps, task = sorted(by_step), _rl_task(rl)
    return Section(
        title="Rewarded samples of RL",
        notes=(f"Sampled answers to one question of {task} in a step, each with its reward.",),
        samples=tuple(
            Sample(
                note=f"step {step}",
                prompt=visible(str(by_step[step][0]["prompt"])),
                answers=tuple(
                    (f"reward {line['reward']:g}", visible(str(line["text"])))
                    for line in by_step[step]
                ),
            )
            # A set: with one or two steps some of the three are the same.
            for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]})
        ),
    )


def _base_samples(base: Artifact) -> Section:
    scores = base.read_json("scores.json")
    known = ((name, score) for name in scores if (score := measured(scores, name)))
    return Section(
        title="Samples of the base model",
        notes=(", ".join(f"{name} {score.text(decimals=4)}" for name, score in known),),
        samples=tuple(
            Sample(prompt=visible(prompt), answers=(("", visible(text)),))
            for prompt, text in base.samples()
        ),
    )


def _vocabulary(tokenizer: Artifact) -> Section | None:
    """Return bytes per token of ours and of VOCABULARIES on each kind of text.

    None: ours is small, or its artifact has no such events.
    """
    # The tokenizer logs one event at step 0: "code" is ours, "code/gpt2" that of GPT-2.
    values = last_by_step(iter(tokenizer.events), "eval").get(0, {})
    vocab_size = tokenizer.manifest.provenance.metrics.get("vocab_size", MIN_VOCABULARY)
    if vocab_size < MIN_VOCABULARY or not values:
        return None
    best = max(values.values())

    def cell(name: str) -> CardCell:
        value = values.get(name)
        return (
            CardCell("", ("not at hand",))
            if value is None
            else CardCell(f"{value:.2f}", span=(0, value / best))
        )

    return Section(
        title="Vocabulary",
        notes=(
            "Bytes per token: more is better. All kinds but held-out are short texts of our own, "
            "those in languages the same story.",
        ),
        style="scores",
        head=("text", "ours", *VOCABULARIES.values()),
        rows=tuple(
            (CardCell(name), cell(name), *(cell(f"{name}/{other}") for other in VOCABULARIES))
            for name in values
            if "/" not in name
        ),
    )


def _stages(artifacts: Mapping[str, Artifact]) -> Section:
    # REPORT.inputs has every stage before the report, in the order in which they are built.
    manifests = [artifacts[stage.name].manifest for stage in REPORT.inputs]
    priced = any(manifest.provenance.dollars for manifest in manifests)
    numbers = ("files", "size", "time", *(("cost",) if priced else ()))
    return Section(
        title="Stages",
        head=("stage", "what it made", *numbers),
        right=numbers,
        rows=tuple(
            cells(
                stage.name,
                stage.makes,
                str(len(manifest.files)),
                size(sum(file.size for file in manifest.files)),
                duration(manifest.provenance.seconds),
                *([money(manifest.provenance.dollars)] if priced else []),
            )
            for stage, manifest in zip(REPORT.inputs, manifests, strict=True)
        ),
    )


def _lineage(artifacts: Mapping[str, Artifact]) -> Section:
    def row(stage: Stage) -> tuple[CardCell, ...]:
        made = artifacts[stage.name].manifest
        sources = [f"{s.name} `{short(made.inputs[s.name].digest)}`" for s in stage.inputs]
        return cells(
            stage.name,
            f"`{short(made.fingerprint)}`",
            f"`{short(made.digest)}`",
            ", ".join(sources) or "nothing earlier",
        )

    return Section(
        title="Lineage",
        notes=(
            "A fingerprint says what a stage was asked to make, a digest what the files are. Equal "
            "digests are equal bytes.",
        ),
        head=("stage", "fingerprint", "digest", "made from"),
        rows=tuple(map(row, REPORT.inputs)),
    )


def _speed(artifacts: Mapping[str, Artifact]) -> Section:
    mfu = {stage.name: _median(artifacts[stage.name], "mfu") for stage in MODELS}
    has_mfu = any(value is not None for value in mfu.values())  # a GPU whose peak is known
    numbers = ("steps", "tokens per second", *(("MFU",) if has_mfu else ()))

    def row(stage: Stage) -> tuple[CardCell, ...]:
        artifact = artifacts[stage.name]
        steps = [event["step"] for event in artifact.events if event["kind"] == "step"]
        speed, share = _median(artifact, "tokens_per_second"), mfu[stage.name]
        return cells(
            stage.name,
            _machine(artifact.manifest.provenance),
            str(max(steps, default=0)),
            f"{speed:,.0f}" if speed is not None else "not counted",
            *([percent(share) if share is not None else "not known"] if has_mfu else []),
            listed(artifact.stops()) or "never",
        )

    return Section(
        title="Speed and machine",
        head=("stage", "machine", *numbers, "resumed from step"),
        right=numbers,
        rows=tuple(map(row, MODELS)),
        facts=tuple(_facts(artifacts[PRETRAIN.name])),
    )


def _facts(pretrain: Artifact) -> Iterator[tuple[str, str]]:
    """Yield facts about pretraining: its proportions, its machine and the git commit."""
    yield "tokens per parameter", f"{pretrain.metric('tokens') / pretrain.metric('parameters'):.3g}"
    provenance = pretrain.manifest.provenance
    segment, metrics = _last_segment(provenance), provenance.metrics
    shown = {name: segment[name] for name in sorted(segment) if name not in _UNSHOWN}
    names = ("device", "attention", "compile", "determinism")
    shown |= {name: metrics[name] for name in names if name in metrics}
    if "peak_memory_gb" in metrics:
        shown["peak_memory"] = f"{metrics['peak_memory_gb']} GB"
    for name, value in shown.items():
        word = str(value) if not isinstance(value, bool) else "yes" if value else "no"
        yield name.replace("_", " "), word
    if provenance.git_commit:
        yield "git commit", provenance.git_commit


def _reproduce(found: Reproduction) -> Section:
    return Section(
        title="Reproduce",
        notes=(
            "Gives the same settings to the last digit. Where it runs changes nothing, and is left "
            "out."
            if found.command
            else "No one command makes these artifacts.",
        ),
        # Not `visible`, which cuts long text: half a command is not one.
        code=escaped(found.command or ""),
        items=(
            *map(visible, found.notes),
            f"all settings together have the digest `{found.digest}`",
        ),
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
