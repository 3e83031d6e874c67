"""The report card: a page of what a run trained, how well it does, and what it cost."""

import re
import shlex
import time
from collections.abc import Mapping
from typing import Any

from flows.identity.ref import name_in
from flows.render.charts import charts_of
from flows.render.page import Page, Sample, Section
from flows.render.table import Cell
from flows.render.text import (
    count,
    duration,
    escaped,
    percent,
    visible,
)
from flows.report.command import Reproduction, reproduction_of
from flows.report.details import (
    ended,
    lineage_section,
    machine,
    speed_section,
    stages_section,
    vocabulary_section,
)
from flows.report.inputs import Artifact
from flows.report.scores import (
    chat_scores,
    chat_section,
    core_section,
    measured,
    summary,
    turns_section,
)
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
)

# A call of the calculator, `<<7+5=12>>`, and the marker of a final number, as `#### 12`.
_MARKER = r"#### (?=-?[0-9][0-9.,]*[ \t]*$)"
_CALL_OR_MARKER = re.compile(
    rf"<<([^<>]+?)(?:=([^<>=]*))?>>({_MARKER})?|^{_MARKER}", flags=re.MULTILINE
)
_MAX_COMMAND = 160  # letters of a command that the head of the card shows


def make_card(artifacts: Mapping[str, Artifact]) -> tuple[Page, dict[str, float]]:
    """Return the card of one run, and the metrics of the report's own artifact.

    Raises ArtifactError if an artifact lacks what the card shows.
    """
    pretrain, base = artifacts[PRETRAIN.name], artifacts[BASE_EVAL.name]
    newest = max((artifacts[s.name].manifest.provenance for s in REPORT.inputs), key=ended)
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
        _reproduce(command),
        turns_section(chat),
        _rewarded(artifacts[RL.name]),
        _base_samples(base),
        vocabulary_section(artifacts[TOKENIZER.name]),
        stages_section(artifacts),
        lineage_section(artifacts),
        speed_section(artifacts),
    )
    words = shlex.join(shlex.split((command.command or "").replace("\\\n", "")))
    made_by = f"Made by `{visible(words)}`" if 0 < len(words) <= _MAX_COMMAND else ""
    page = Page(
        kind="Report card",
        # Of the run that built the newest of the artifacts.
        heading=visible(name_in(newest.run) or newest.run),
        made=f"{time.strftime('%Y-%m-%d', time.gmtime(ended(newest)))}, "
        f"{machine(pretrain.manifest.provenance)}",
        lead=[*filter(None, (_lead(artifacts), made_by))],
        tiles=(
            (
                "Validation bits per byte",
                Cell(f"{last:.4f}", (note,), tone="better" if fall > 0 else ""),
            ),
            *(
                (f"ChatCORE after {m.label}", c)
                for m, c in zip(chat.models, chat.chatcore_row, strict=True)
            ),
        ),
        summary=tuple(summary(pretrain.manifest.provenance.metrics, chat)),
        sections=tuple(section for section in sections if section),
        footer="Made from manifests, events and artifact files alone: the same artifacts give the "
        "same page.",
    )
    return page, {"val_bpb": last, "val_bpb_fall": fall}


def _lead(artifacts: Mapping[str, Artifact]) -> str:
    """Return the size, time and cost of the run."""
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
        f"{price}."
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


def _learning(artifacts: Mapping[str, Artifact]) -> Section:
    """Return the curves of training; a few measurements are a line of text, not a curve."""
    charts = [
        chart
        for stage in REPORT.inputs
        if stage.curves
        for chart in charts_of(
            stage.name, artifacts[stage.name].events, artifacts[stage.name].stops()
        )
    ]
    few = [chart for chart in charts if chart.is_short]
    return Section(
        title="Learning",
        notes=(
            "A faint line is what was measured, a strong one its moving average, without the first "
            "twentieth of the steps. A dashed line is where a job resumed; a dotted one where it "
            "had stopped, if steps were repeated.",
            *(
                f"{chart.quantity.title}, {chart.quantity.caption}: "
                + ", ".join(f"{value:.4g} at step {step}" for step, value in chart.curves[0])
                + "."
                for chart in few
            ),
        ),
        charts=[each.panel for each in charts if any(each.curves) and each not in few],
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
                (label, _answer(by_prompt[prompt]))
                for label, by_prompt in answers.items()
                if prompt in by_prompt
            ),
        )
        for prompt in prompts
    )


def _answer(text: str) -> str:
    """Return an answer of a chat model as `nanochat chat` shows it: its calls, and no markers."""

    def shown(found: re.Match[str]) -> str:
        expression, result, marker = found.groups()
        if expression is None:
            return ""  # a marker at the start of a line
        before, after = (
            text[max(found.start() - 1, 0) : found.start()],
            text[found.end() : found.end() + 1],
        )
        space = " " if before and not before.isspace() else ""
        call = f"{space}[calculator: {expression}{'' if result is None else f' = {result}'}]"
        return call + ("\n" if marker else " " if after.isalnum() else "")

    return visible(_CALL_OR_MARKER.sub(shown, text))


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
        folded=True,
        notes=(f"Sampled answers to one question of {task} in a step, each with its reward.",),
        samples=tuple(
            Sample(
                note=f"step {step}",
                prompt=visible(str(by_step[step][0]["prompt"])),
                answers=tuple(
                    (f"reward {line['reward']:g}", _answer(str(line["text"])))
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
        folded=True,
        notes=(", ".join(f"{name} {score.text(decimals=4)}" for name, score in known),),
        samples=tuple(
            Sample(prompt=visible(prompt), answers=(("", visible(text)),))
            for prompt, text in base.samples()
        ),
    )


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
