"""`nanochat plan`: show what a run would do, and why; also of one stage."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flows.artifacts.names import check_stage
from flows.cli.describe import artifact_tree, describe, list_files
from flows.cli.options import CHANGES, AsJson, ExitCode, ProfileName, RunOptions
from flows.cli.output import print_json, print_lines, print_unread
from flows.cli.requests import plan_request, read_request
from flows.identity.manifest import Manifest
from flows.plan.plan import STATES, StagePlan
from flows.plan.planned import Planned
from flows.plan.render import render, stage_tree, to_tree
from flows.render.table import Table, facts
from flows.render.text import duration, listed, money
from infra.storage.base import Store


def plan(
    profile: ProfileName,
    stage: str | None = None,
    /,
    *,
    options: RunOptions = RunOptions(),
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Show what a run would do, stage by stage, and why. Computes nothing.

    With --exit-code it exits with 3 when there is something to run, with STAGE when that stage has
    to be built.

    Args:
        stage: Show this stage alone: its reason, inputs, artifact and executions.
    """
    request = read_request(profile, options)
    if stage is not None:
        check_stage(stage)
    found = plan_request(request, options, will_run=False)
    planned, name, profile = found.plan, found.name, found.request.profile
    print_unread(planned.unread)
    item = None if stage is None else planned.of(stage)
    up_to_date = planned.up_to_date if item is None else item.state == "="
    code = CHANGES if exit_code and not up_to_date else 0
    if item is not None:
        print_stage(found, item, as_json=as_json)
        return code
    if as_json:
        settings = [asdict(setting) for setting in found.settings]
        print_json({"run_name": name, "settings": settings, **to_tree(planned)})
        return code
    if name != profile or found.settings:
        print_lines([f"run {name}", *(f"  {setting}" for setting in found.settings), ""])
    print_lines(render(planned, name=profile))
    return code


# One stage.


def print_stage(planned: Planned, item: StagePlan, *, as_json: bool) -> None:
    """Print why a stage would run or not, what it is made from and what it made."""
    settings = list(_changed(planned, item.stage.name))
    others = _find_divergences(planned.store, item.manifest) if item.manifest else []
    if as_json:
        # The stage as `nanochat plan --json` prints it, with more fields: one format for programs.
        print_json(stage_tree(item) | {"settings": settings} | _to_tree(item, others))
    else:
        print_lines(_describe(item, planned.plan.store, others, settings))


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
    stage, manifest, artifact = item.stage, item.manifest, None
    if manifest is not None:
        artifact = {"fingerprint": manifest.fingerprint, "accepted": manifest.accepted}
        artifact |= artifact_tree(manifest) | {"divergences": others} | asdict(manifest.provenance)
    fields = {name: getattr(stage, name) for name in ("makes", "entry", "compute")}
    inputs = [source.name for source in stage.inputs]
    return fields | {"config": list(stage.config), "inputs": inputs, "artifact": artifact}


def _describe(
    item: StagePlan, store: str, others: list[str], settings: list[str]
) -> Iterator[str | Table]:
    yield f"{item.stage.name}: makes {item.stage.makes}"
    unlike = [("unlike profile", setting) for setting in settings]
    yield facts([*_facts(item), *unlike])
    if item.changes:
        yield ""
        yield "changed since the nearest artifact:"
        for change in item.changes:
            yield f"  {change}"
    if item.manifest:
        yield from ("", f"artifact {item.manifest.name}:")
        about = describe(
            item.manifest,
            f"{store}/{item.manifest.ref.prefix}",
            revoked=item.revoked,
            ancestors=item.revoked_ancestors,
            others=others,
        )
        yield facts(about)
        yield from list_files(item.manifest)


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
