"""Render a plan as lines for people and as JSON for programs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from flows.artifacts.revocations import Revoked
from flows.identity.ref import short
from flows.plan.plan import STATES, Plan, StagePlan, State
from flows.render.table import Cell, Table, texts
from flows.render.text import duration, money

_FORMAT = 2  # of the JSON
_TOO_LONG = 30 * 86400.0  # seconds
_SUMMARY: dict[State, str] = {
    "x": "revoked",
    "+": "to build",
    "~": "to rebuild",
    ">": "to resume",
    "!": "being built",
    "?": "provisional",
    "=": "up to date",
}


def render(plan: Plan, *, name: str = "this model") -> list[str | Table]:
    """Return the plan for people: a table, an empty line, and a summary.

    name: of what is trained.
    """
    stages = table((item, item.stage.name) for item in plan.stages)
    return [stages, "", totals(plan)["summary"], *_warning(plan, name)]


def table(items: Iterable[tuple[StagePlan, str]]) -> Table:
    """Return a row for the plan of each stage, with its label."""
    return Table(
        columns=texts("stage", "state", "fingerprint", "estimate", "reason"),
        rows=[_row(*item) for item in items],
        head=False,
    )


def _row(item: StagePlan, label: str) -> tuple[str | Cell, ...]:
    estimate = item.estimate
    took = estimate and f"{duration(estimate.seconds)} ({estimate.source})"
    return (
        Cell(f"{item.state} {label}", tone=item.state),
        Cell(STATES[item.state], tone=item.state),
        short(item.fingerprint) if item.fingerprint else "",
        "needs GPUs" if _is_too_slow(item) else took or "",
        item.reason,
    )


def _warning(plan: Plan, name: str) -> list[str]:
    """Return a line for each stage that the CPU of this machine is too slow for."""
    return [
        f"warning: this machine cannot train {name}: {item.stage.name} would take "
        f"about {duration(item.estimate.seconds)} on its CPU; --pool names machines with GPUs, "
        "and `nanochat doctor --as h100` says what one would take"
        for item in plan.stages
        if item.estimate and _is_too_slow(item)
    ]


def _is_too_slow(item: StagePlan) -> bool:
    """Return whether the CPU of this machine would take a month or more for a stage."""
    found = item.estimate
    return found is not None and found.seconds > _TOO_LONG and not found.on_gpus


def to_tree(plan: Plan) -> dict[str, Any]:
    """Return the plan for programs, as JSON values: all stages in the table's order."""
    return {
        "format": _FORMAT,
        "store": plan.store,
        "up_to_date": plan.up_to_date,
        **totals(plan),
        "stages": [stage_tree(item) for item in plan.stages],
    }


def stage_tree(item: StagePlan) -> dict[str, object]:
    """Return the plan of a stage as JSON values."""
    manifest = item.manifest
    return {
        "stage": item.stage.name,
        "state": item.state,
        "meaning": STATES[item.state],
        "fingerprint": item.fingerprint,
        "inputs": [source.name for source in item.stage.inputs],
        "artifact": None
        if manifest is None
        else {
            "fingerprint": manifest.fingerprint,
            "digest": manifest.digest,
            "run": manifest.provenance.run,
            "created": manifest.provenance.created,
        },
        "reason": item.reason,
        "changes": [asdict(change) for change in item.changes],
        "after": list(item.after),
        "revoked": _revoked_to_tree(item.revoked) if item.revoked else None,
        "revoked_ancestors": [_revoked_to_tree(revoked) for revoked in item.revoked_ancestors],
        "builder": item.builder,
        "resume": asdict(item.resume) if item.resume else None,
        "estimate": asdict(item.estimate) if item.estimate else None,
    }


def _revoked_to_tree(revoked: Revoked) -> dict[str, str]:
    return {
        **revoked.ref._asdict(),
        "when": revoked.revocation.when,
        "who": revoked.revocation.who,
        "why": revoked.revocation.why,
    }


def totals(plan: Plan) -> dict[str, Any]:
    """Return the summary and the sums of the estimates as JSON values."""
    known = [item.estimate for item in plan.stages if item.estimate]
    slow = any(map(_is_too_slow, plan.stages))
    seconds, dollars = sum(e.seconds for e in known), sum(e.dollars for e in known)
    # Stages that may run, and of which no build like it has been timed.
    unknown = sum(item.state != "=" and item.estimate is None for item in plan.stages)
    counts = Counter(item.state for item in plan.stages)
    summary = ", ".join(f"{counts[s]} {word}" for s, word in _SUMMARY.items() if counts[s])
    if plan.up_to_date:
        summary = f"nothing to run: {len(plan.stages)} stages up to date"
    else:
        took = duration(seconds) + (f", {money(dollars)}" if dollars else "")
        if unknown:
            summary += f"; {unknown} of {unknown + len(known)} stages have no estimate"
        if known and not slow:
            summary += f"; the rest take {took}" if unknown else f"; about {took}"
    return {
        "summary": summary,
        "seconds": seconds,
        "dollars": dollars,
        "without_estimate": unknown,
    }
