"""Print state, reason, inputs, artifact and executions of one stage of a plan."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flows.artifacts.revocations import accepted_from
from flows.cli.output import age, print_json, print_lines
from flows.identity.manifest import Facts, Manifest
from flows.identity.ref import short
from flows.plan.plan import STATES, StagePlan
from flows.plan.planned import Planned
from flows.plan.render import stage_tree
from flows.render.events import interval, is_end
from flows.render.table import Table, facts
from flows.render.text import duration, listed, money, number
from infra.storage.base import Store


def print_stage(planned: Planned, item: StagePlan, *, as_json: bool) -> None:
    """Print why a stage would run or not, what it is made from and what it made."""
    settings = list(_changed(planned, item.stage.name))
    others = _find_divergences(planned.store, item.manifest) if item.manifest else []
    if as_json:
        # The stage as `nanochat plan --json` prints it, with more fields: one format for programs.
        print_json(stage_tree(item) | {"settings": settings} | _to_tree(item, others))
    else:
        print_lines(_describe(item, others, settings))


def _changed(planned: Planned, stage: str) -> Iterator[str]:
    """Yield the settings that differ from the profile's and may change the result of a stage."""
    for setting in planned.settings:
        if stage in setting.stages:
            yield setting.change
        elif stage in setting.after:
            yield f"{setting.change}, by way of {listed(setting.stages)}"


def _find_divergences(store: Store, manifest: Manifest) -> list[str]:
    """Return the keys of manifests with the same fingerprint and other contents."""
    # The manifest names those that existed when it was published. A builder that came later put its
    # own below divergences/.
    late = store.list(f"{manifest.ref.divergences_prefix}/")
    return [*manifest.divergences, *(entry.key for entry in late)]


def _to_tree(item: StagePlan, others: list[str]) -> dict[str, Any]:
    """Return the fields of a stage that the plan's JSON does not have."""
    stage = item.stage
    return {
        "makes": stage.makes,
        "entry": stage.entry,
        "compute": stage.compute,
        "config": list(stage.config),
        "inputs": [source.name for source in stage.inputs],
        "artifact": _artifact_to_tree(item.manifest, others) if item.manifest else None,
    }


def _artifact_to_tree(manifest: Manifest, others: list[str]) -> dict[str, Any]:
    return {
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest,
        "accepted": manifest.accepted,
        "inputs": {name: asdict(source) for name, source in manifest.inputs.items()},
        "files": [asdict(file) for file in manifest.files],
        "logs": [asdict(file) for file in manifest.logs],
        "divergences": others,
        **asdict(manifest.provenance),
    }


def _describe(item: StagePlan, others: list[str], settings: list[str]) -> Iterator[str | Table]:
    yield f"{item.stage.name}: makes {item.stage.makes}"
    unlike = [("unlike profile", setting) for setting in settings]
    yield facts([*_facts(item), *unlike], indent="  ")
    if item.changes:
        yield ""
        yield "changed since the nearest artifact:"
        for change in item.changes:
            yield f"  {change}"
    if item.manifest:
        yield ""
        yield f"artifact {item.manifest.name}:"
        yield facts(_facts_of(item, item.manifest, others), indent="  ")


def _facts(item: StagePlan) -> Iterator[tuple[str, str]]:
    stage = item.stage
    yield "state", f"{item.state} {STATES[item.state]}"
    if item.reason:
        yield "reason", item.reason
    if item.fingerprint:
        yield "fingerprint", item.fingerprint
    # GPU stages run on the CPU where there is no GPU, as in the profile tiny.
    device = "a GPU where there is one" if stage.compute == "gpu" else "the CPU"
    yield "entry", f"{stage.entry}, on {device}"
    yield "config", ", ".join(stage.config) or "none"
    yield "inputs", ", ".join(source.name for source in stage.inputs) or "none"
    if item.estimate:
        took = duration(item.estimate.seconds)
        yield "estimate", f"{took}, {money(item.estimate.dollars)} ({item.estimate.source})"


def _facts_of(item: StagePlan, manifest: Manifest, others: list[str]) -> Iterator[tuple[str, str]]:
    made = manifest.provenance
    if item.revoked is not None:
        revocation = item.revoked.revocation
        yield "revoked", f"{age(revocation.when)} by {revocation.who}: {revocation.why}"
    for revoked in item.revoked_ancestors:
        yield "made from", str(revoked)
    # An accepted artifact has the bytes of older ones, down the chain of acceptances.
    if accepted := manifest.accepted:
        sources = ", ".join(ref.name for ref in accepted_from(manifest))
        proof = "unproven" if accepted["proof"] is None else "proven"
        yield "accepted", f"{age(accepted['when'])} by {accepted['who']}: {accepted['why']}"
        yield "", f"the bytes of {sources}; {proof}"
    yield "made", f"{age(made.created)} by run {made.run}"
    if made.git_commit:
        yield "commit", short(made.git_commit)
    yield "digest", short(manifest.digest)
    for key in others:
        yield "diverged", f"another result of the same work: {key}"
    for name, source in manifest.inputs.items():
        yield "from", f"{name}/{short(source.fingerprint)}"
    for metric in _metrics(made.metrics):
        yield "metric", metric
    for segment in made.segments:
        yield "execution", _execution(segment)
    for file in manifest.files:
        yield "file", f"{file.path} ({file.size:,} bytes)"


def _metrics(metrics: Facts) -> Iterator[str]:
    for name, value in metrics.items():
        if not is_end(metrics, name):
            shown = number(value) if isinstance(value, float) else value
            between = interval(metrics, name)
            yield f"{name} = {shown}" + (f" ({between})" if between else "")


def _execution(segment: Facts) -> str:
    """Return one execution of the job as text: steps, device, host, time and dollars.

    Fields are optional: a stage without steps has no last_step, a killed execution no end.
    """
    words: list[str] = []
    if segment.get("last_step"):
        words.append(f"steps {segment['first_step']} to {segment['last_step']}")
    processes = segment.get("processes", 1)
    several = f"{processes} processes" if processes > 1 else "1 process"
    device = f" on {segment['device']}" if "device" in segment else ""
    host = f" of {segment['host']}" if "host" in segment else ""
    words.append(f"{several}{device}{host}")
    if "ended" in segment:
        words.append(duration(segment["ended"] - segment["started"]))
    if "dollars" in segment:
        words.append(f"${segment['dollars']:.2f}")
    return ", ".join(words)
