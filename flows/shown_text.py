"""The words and tables that Prefect's pages show of one stage."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flows.display import duration, number
from flows.manifest import Manifest
from flows.report_text import escaped, percent

_MOST_LOG = 20_000  # characters of a log's end
_MOST_VALUES = 4  # of a step
_INTERVAL = "95 % interval"


def progress_text(values: Mapping[str, Any], *, unit: str, step: int, total: int) -> str:
    """Where a loop is: "step 120 of 320, loss 3.21, 4,887 tokens/s"."""
    numbers = [(name, value) for name, value in values.items() if type(value) in (int, float)]
    shown = [_value(name, value) for name, value in numbers[:_MOST_VALUES]]
    return ", ".join([f"{unit} {step:,} of {total:,}", *shown])


def _value(name: str, value: float) -> str:
    match name:
        case "tokens_per_second":
            return f"{value:,.0f} tokens/s"
        case "mfu":
            return f"{percent(value)} MFU"
        case "seconds":
            return f"{duration(value)} a step"
        case _:
            return f"{name.replace('_', ' ')} {number(value)}"


def metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric, with its interval where at least one has one."""
    ends = {f"{name}_{end}" for name in metrics for end in ("low", "high")}
    rows = [
        {"metric": name, "value": _rounded(value), _INTERVAL: _interval(metrics, name)}
        for name, value in metrics.items()
        if name not in ends
    ]
    if not any(row[_INTERVAL] for row in rows):
        for row in rows:
            del row[_INTERVAL]
    return rows


def _interval(metrics: Mapping[str, Any], name: str) -> str:
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def _rounded(value: Any) -> Any:
    """A number with as many digits as anybody reads; everything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def failure_text(stage: str, event: Mapping[str, Any], *, last_seen: str | None) -> str:
    """What is known of a failure: `event` is of kind `failed`, `last_seen` how far it was."""
    parts = [f"# {stage} failed", fenced(event["error"])]
    if last_seen is not None:
        parts.append(f"It was last seen at {last_seen}.")
    if hint := event.get("hint"):
        parts += ["**What to do**", fenced(hint.replace("; ", "\n"))]  # lines are not folded
    if event["log_tail"]:
        parts += ["**The end of the failing rank's log**", fenced(event["log_tail"][-_MOST_LOG:])]
    parts.append(
        "Finished stages and saved checkpoints are kept: *Retry* on the flow run's page, or the "
        "same run started again, goes on from there."
    )
    return "\n\n".join(parts) + "\n"


def resumed_text(manifest: Manifest) -> str | None:
    """From where the job's last execution went on; None when it did all by itself."""
    segments = manifest.provenance.segments
    if not segments or not segments[-1]["first_step"]:
        return None
    return f"resumed at step {segments[-1]['first_step']} of {segments[-1]['last_step']}"


def fenced(text: str) -> str:
    """`text`, with what is invisible made visible, in a block that nothing in it can close."""
    shown = escaped(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
