"""What a GPU does in some steps: kernels by class and by section, the longest ones, and the gaps.

A section is what runs between `section`'s begin and end, as the optimizer's step. On a CPU it is
torch's operations instead of kernels, each without those that it calls.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from nanochat_core.engine.speed import wait_for_gpu

LONGEST = 40  # kernels to report
GAP = 20.0  # microseconds: longer ones are counted
SECTION = "section "  # before the name of a section, in a trace
REST = "rest"  # outside of all sections
# The first that a kernel's name has; of nanochat's generated code some computes the loss.
CLASSES = {
    "attention": r"sdpa|flash|fmha|attention|flex|attend",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(_scaled_)?(mm|addmm|bmm|baddbmm)",
    "tables": r"^(add_rows|sum_pieces)|embedding|radix|scan|sort",
    "loss": r"log_softmax|nll_loss|tanh",
    "compiled": r"^triton_",
    "copies": r"memcpy|memset|copy|fill|catarray",
    "elementwise": r"elementwise|foreach|multi_tensor",
    "sums": r"reduce",
}
Span = tuple[float, float]  # begin and end in microseconds


@dataclass(frozen=True)
class Event:
    """Something that ran: a kernel, or on a CPU an operation."""

    name: str
    span: Span
    microseconds: float  # without what it called


class Profiler:
    """Profiles from its making until `stop`."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        # The CPU's part marks the sections; it slows launches and no kernel.
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        wait_for_gpu()
        self._profile = profile(activities=activities)
        self._profile.start()

    def section(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return what marks a section."""
        return record_function(SECTION + name)

    def stop(self) -> dict[str, Any]:
        """Return the summary."""
        wait_for_gpu()
        self._profile.stop()
        kind = DeviceType.CUDA if self._on_gpu else DeviceType.CPU
        events = [
            Event(
                name=e.name,
                span=(e.time_range.start, e.time_range.end),
                microseconds=(
                    e.time_range.end - e.time_range.start
                    if self._on_gpu
                    else float(e.self_cpu_time_total)
                ),
            )
            for e in self._profile.events() or ()
            # Other annotations, as the compiler's, span kernels and would count them twice.
            if e.device_type == kind and (e.name.startswith(SECTION) or not e.is_user_annotation)
        ]
        return summary(events)


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return the milliseconds of each class in each section, the longest, and how busy it was."""
    sections = [e for e in events if e.name.startswith(SECTION)]
    ran = [e for e in events if not e.name.startswith(SECTION)]
    classes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in ran:
        section = section_of(event, sections)
        classes[section][class_of(event.name)] += event.microseconds / 1e3
        times[event.name] += event.microseconds / 1e3
        counts[event.name] += 1
    spans = merged(event.span for event in ran)
    whole = spans[-1][1] - spans[0][0] if spans else 0.0
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    longest = sorted(times, key=lambda name: -times[name])[:LONGEST]
    return {
        "milliseconds": round(whole / 1e3, 3),
        "events": len(ran),
        "busy": round(sum(end - begin for begin, end in spans) / whole, 4) if whole else 0.0,
        "gaps": sum(gap > GAP for gap in gaps),
        "gap_milliseconds": round(sum(gap for gap in gaps if gap > GAP) / 1e3, 3),
        "classes": {
            section: {name: round(ms, 3) for name, ms in sorted(of.items(), key=lambda i: -i[1])}
            for section, of in classes.items()
        },
        "longest": [
            {"name": n[:160], "count": counts[n], "milliseconds": round(times[n], 3)}
            for n in longest
        ],
    }


def lines(title: str, found: dict[str, Any], *, longest: int = 8) -> list[str]:
    """Return a summary as lines for people."""
    return [
        f"{title}: {found['milliseconds']:.1f} ms, {found['events']} events, "
        f"{found['busy']:.1%} busy, {found['gaps']} gaps of more than {GAP:.0f} us",
        *(
            f"  {section}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in of.items()) + " ms"
            for section, of in found["classes"].items()
        ),
        *(
            f"  {row['milliseconds']:9.3f} ms {row['count']:6} x {row['name'][:80]}"
            for row in found["longest"][:longest]
        ),
    ]


def section_of(event: Event, sections: Sequence[Event]) -> str:
    """Return the name of the shortest section in which an event began."""
    begin = event.span[0]
    around = [s for s in sections if s.span[0] <= begin < s.span[1]]
    if not around:
        return REST
    return min(around, key=lambda s: s.span[1] - s.span[0]).name.removeprefix(SECTION)


def class_of(name: str) -> str:
    """Return the class of a kernel or an operation."""
    found = (of for of, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
