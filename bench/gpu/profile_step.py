"""Where a training step's time goes on the GPU: kernels by time, and the gaps between them.

python -m bench.gpu.profile_step d12 d24-fp8 [--dry]
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice, pairwise
from typing import Any

from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from bench.gpu.nvml import find_gpu
from bench.gpu.pairs import CASES, fit, shrink
from bench.gpu.report import needs_gpu, result, say
from bench.gpu.trainer import train
from bench.train import Case
from nanochat_core.engine.speed import wait_for_gpu

MOST = 25  # kernels
GAP = 20.0  # microseconds: longer ones are counted
Span = tuple[float, float]  # begin and end in microseconds


def main() -> None:
    """Profile one step of each case, after two; after one on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--dry", action="store_true", help="on a CPU, at depth 2")
    options = parser.parse_args()
    for name in options.cases:
        case = shrink(CASES[name]) if options.dry else fit(CASES[name], find_gpu())
        profile_case(case)
    if options.dry:
        needs_gpu("kernels and gaps of a step")


def profile_case(case: Case) -> None:
    """Report the kernels of one step; on a CPU its operations."""
    on_gpu = case.device == "cuda"
    steps = train(asdict(case) | {"threads": 4 if on_gpu else 1})
    for _ in islice(steps, 2 if on_gpu else 1):
        wait_for_gpu()
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        next(steps)
        wait_for_gpu()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.events() or () if event.device_type == kind]
    report(case, [(e.name, (e.time_range.start, e.time_range.end)) for e in events])


def report(case: Case, events: Sequence[tuple[str, Span]]) -> None:
    """Report the longest of a step's events by name, and how much of the time one was running."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, (begin, end) in events:
        times[name] += end - begin
        counts[name] += 1
    spans = merged(span for _, span in events)
    whole = spans[-1][1] - spans[0][0]
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    top = sorted(times, key=lambda name: -times[name])[:MOST]
    values: dict[str, Any] = {
        "milliseconds": whole / 1e3,
        "events": len(events),
        "busy": sum(end - begin for begin, end in spans) / whole,
        "gaps": sum(gap > GAP for gap in gaps),
        "gap_milliseconds": sum(gap for gap in gaps if gap > GAP) / 1e3,
    }
    top_rows = [{"name": n, "count": counts[n], "milliseconds": times[n] / 1e3} for n in top]
    result(f"profile {case.name}", **values, top=top_rows)
    say(
        f"{case.name}: a step of {values['milliseconds']:.1f} ms, {len(events)} events, "
        f"{values['busy']:.1%} busy, {values['gaps']} gaps of more than {GAP:.0f} us"
    )
    for row in top_rows:
        say(f"  {row['milliseconds']:9.3f} ms {row['count']:6} x {row['name'][:80]}")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


if __name__ == "__main__":
    main()
