"""Sections of the report card that its page shows folded: vocabulary, stages, lineage, speed."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from flows.identity.manifest import Provenance
from flows.identity.ref import short
from flows.render.charts import points_of
from flows.render.page import Section
from flows.render.table import Cell, Table, numbers, texts
from flows.render.text import duration, listed, money, percent, size
from flows.report.inputs import Artifact
from flows.stages import MODELS, PRETRAIN, REPORT, Stage
from nanochat_core.runtime.progress import last_by_step

MIN_VOCABULARY = 1024  # tokens: smaller ones are not compared
VOCABULARIES = {"gpt2": "GPT-2", "cl100k_base": "GPT-4"}  # compared with ours; name -> title
# Fields of a segment that are no facts of the machine, and its host name.
_UNSHOWN = {"host", "first_step", "last_step", "started", "ended", "dollars"}


def vocabulary_section(tokenizer: Artifact) -> Section | None:
    """Return bytes per token of ours and of VOCABULARIES on each kind of text.

    None: ours is small, or its artifact has no such events.
    """
    # The tokenizer logs one event at step 0: "code" is ours, "code/gpt2" that of GPT-2.
    values = last_by_step(iter(tokenizer.events), "eval").get(0, {})
    vocab_size = tokenizer.manifest.provenance.metrics.get("vocab_size", MIN_VOCABULARY)
    if vocab_size < MIN_VOCABULARY or not values:
        return None
    best = max(values.values())

    def cell(name: str) -> Cell:
        value = values.get(name)
        return (
            Cell("", ("not available",))
            if value is None
            else Cell(f"{value:.2f}", span=(0, value / best))
        )

    return Section(
        title="Vocabulary",
        folded=True,
        notes=(
            "Bytes per token: more is better. All kinds but held-out are short texts of our own, "
            "those in languages the same story.",
        ),
        style="scores",
        table=Table(
            columns=texts("text", "ours", *VOCABULARIES.values()),
            rows=[
                (name, cell(name), *(cell(f"{name}/{other}") for other in VOCABULARIES))
                for name in values
                if "/" not in name
            ],
        ),
    )


def stages_section(artifacts: Mapping[str, Artifact]) -> Section:
    """Return what each stage made, with its size, time and cost."""
    # REPORT.inputs has every stage before the report, in the order in which they are built.
    manifests = [artifacts[stage.name].manifest for stage in REPORT.inputs]
    priced = any(manifest.provenance.dollars for manifest in manifests)
    costs = numbers("files", "size", "time", *(("cost",) if priced else ()))
    return Section(
        title="Stages",
        folded=True,
        style="cards",
        table=Table(
            columns=(*texts("stage", "what it made"), *costs),
            rows=[
                (
                    stage.name,
                    stage.makes,
                    str(len(manifest.files)),
                    size(sum(file.size for file in manifest.files)),
                    duration(manifest.provenance.seconds),
                    *([money(manifest.provenance.dollars)] if priced else []),
                )
                for stage, manifest in zip(REPORT.inputs, manifests, strict=True)
            ],
        ),
    )


def lineage_section(artifacts: Mapping[str, Artifact]) -> Section:
    """Return fingerprint, digest and inputs of each artifact."""

    def row(stage: Stage) -> tuple[str, ...]:
        made = artifacts[stage.name].manifest
        sources = [f"{s.name} `{short(made.inputs[s.name].digest)}`" for s in stage.inputs]
        return (
            stage.name,
            f"`{short(made.fingerprint)}`",
            f"`{short(made.digest)}`",
            ", ".join(sources) or "nothing earlier",
        )

    return Section(
        title="Lineage",
        folded=True,
        notes=(
            "A fingerprint says what a stage was asked to make, a digest what the files are. Equal "
            "digests are equal bytes.",
        ),
        style="cards",
        table=Table(
            columns=texts("stage", "fingerprint", "digest", "made from"),
            rows=[*map(row, REPORT.inputs)],
        ),
    )


def speed_section(artifacts: Mapping[str, Artifact]) -> Section:
    """Return the speed of each model's training, its machine and its restarts."""
    mfu = {stage.name: _median(artifacts[stage.name], "mfu") for stage in MODELS}
    has_mfu = any(value is not None for value in mfu.values())  # a GPU whose peak is known
    speeds = numbers("steps", "tokens per second", *(("MFU",) if has_mfu else ()))

    def row(stage: Stage) -> tuple[str, ...]:
        artifact = artifacts[stage.name]
        steps = [event["step"] for event in artifact.events if event["kind"] == "step"]
        speed, share = _median(artifact, "tokens_per_second"), mfu[stage.name]
        return (
            stage.name,
            machine(artifact.manifest.provenance),
            str(max(steps, default=0)),
            f"{speed:,.0f}" if speed is not None else "not counted",
            *([percent(share) if share is not None else "not known"] if has_mfu else []),
            listed(artifact.stops()) or "never",
        )

    return Section(
        title="Speed and machine",
        folded=True,
        style="cards",
        table=Table(
            columns=(*texts("stage", "machine"), *speeds, *texts("resumed from step")),
            rows=[*map(row, MODELS)],
        ),
        items=tuple(_facts(artifacts[PRETRAIN.name])),
    )


def _facts(pretrain: Artifact) -> Iterator[str]:
    """Yield facts about pretraining: its proportions, its machine and the git commit."""
    ratio = pretrain.metric("tokens") / pretrain.metric("parameters")
    yield f"tokens per parameter: {ratio:.3g}"
    provenance = pretrain.manifest.provenance
    segment, metrics = _last_segment(provenance), provenance.metrics
    shown = {name: segment[name] for name in sorted(segment) if name not in _UNSHOWN}
    names = ("device", "attention", "compile", "determinism")
    shown |= {name: metrics[name] for name in names if name in metrics}
    if "peak_memory_gb" in metrics:
        shown["peak_memory"] = f"{metrics['peak_memory_gb']} GB"
    for name, value in shown.items():
        word = str(value) if not isinstance(value, bool) else "yes" if value else "no"
        yield f"{name.replace('_', ' ')}: {word}"
    if provenance.git_commit:
        yield f"git commit: {provenance.git_commit}"


def _median(artifact: Artifact, name: str) -> float | None:
    # The median ignores the first steps, which compile kernels, and pauses for checkpoints.
    values = [value for _, value in points_of(artifact.events, "step", name)]
    return statistics.median(values) if values else None


def _last_segment(provenance: Provenance) -> Mapping[str, Any]:
    # An imported or accepted artifact may have no segments.
    return provenance.segments[-1] if provenance.segments else {}


def ended(provenance: Provenance) -> float:
    """Return when the last execution of the job ended, in seconds since 1970; 0 if not recorded."""
    return _last_segment(provenance).get("ended", 0.0)


def machine(provenance: Provenance) -> str:
    """Return the number of processes and their device."""
    segment = _last_segment(provenance)
    # The stage's own name for the device ("NVIDIA H100 80GB HBM3") is better than "cuda".
    device = str(provenance.metrics.get("device") or segment.get("device") or "not known")
    if device == "cpu" and "threads" in segment:
        threads = "1 thread" if segment["threads"] == 1 else f"{segment['threads']} threads"
        device = f"{provenance.versions.get('processor', 'CPU')}, {threads}"
    processes = segment.get("processes", 1)
    return f"{processes} x {device}" if processes > 1 else device
