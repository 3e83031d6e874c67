"""Estimate the time and cost of a stage: from its nearest builds, else from what was measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.identity.manifest import Manifest
from flows.identity.work import Work, measure_work
from flows.profiles import tiny
from flows.stages import PRETRAIN, Stage
from infra.placement import Placement, gpu_name
from nanochat_core.config import RunConfig
from nanochat_core.roofline import pretraining
from nanochat_core.runtime.hardware.gpu_specs import PRICES_OF, GpuSpec, find_gpu_spec

# Seconds of the stages of profile tiny in `make demo` on two idle cores of an AMD EPYC without
# AVX-512, 2026-11-27: what a first plan on a CPU says.
MEASURED = {
    "shards": 5.8,
    "task_data": 3.8,
    "tokenizer": 0.9,
    "tokens": 1.5,
    "rows": 0.7,
    "pretrain": 40.0,
    "base_eval": 6.2,
    "midtrain": 96.0,
    "sft": 67.0,
    "rl": 32.0,
    "chat_eval_midtrain": 9.0,
    "chat_eval_sft": 9.4,
    "chat_eval_rl": 9.0,
    "report": 2.4,
}
MAX_SCALED = 4.0  # times more or less work than was measured; overheads do not scale
_EQUAL = 1.01  # amounts of work whose ratio is below that are the same
_ASSUMED = "NVIDIA H100"  # where no GPU of this machine says what it is
_CPU_THREAD_FLOPS = 3e10  # a second, fp32: a guess for one core


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and money for what is left of a stage."""

    seconds: float
    dollars: float  # 0: no price is known
    source: str  # where the numbers come from
    on_gpus: bool


def estimate(
    stage: Stage, run: RunConfig, history: Sequence[Manifest], placement: Placement
) -> Estimate | None:
    """Return an estimate of the whole stage. None means nothing is known.

    `history` are artifacts of the stage, in any order. One of another kind of work (see work.py) or
    device is ignored, and of the others only those with the nearest amount of work count. If that
    is more than MAX_SCALED times off, the measured times or the roofline come before them.
    """
    work, device = measure_work(stage, run), _device_for(stage, placement)
    past = _nearest(
        [past for m in history if (past := _past(m, work.kind, placement, device))], work
    )
    measured = _measured(stage, work) if device == "cpu" else None
    is_far = not past or past[0].distance(work) > MAX_SCALED
    seconds, source = None, ""
    if is_far and measured is not None:
        seconds, source = measured, "as measured on two cores"
    elif is_far and stage is PRETRAIN and (device == "cuda" or not past):
        seconds, source = _by_roofline(run, work.amount, placement)
    if seconds is None and past:
        seconds, source = _by_past(past, work, placement, device)
    if seconds is None:
        return None
    price, assumed = _price(stage, placement)
    return Estimate(
        seconds=seconds,
        dollars=seconds / 3600 * price,
        source=source + assumed,
        on_gpus=device == "cuda",
    )


def remaining(whole: Estimate | None, *, step: int, total: int) -> Estimate | None:
    """Return the share of `whole` that is left after `step` of `total` steps."""
    if whole is None:
        return None
    left = 1 - step / total
    return replace(whole, seconds=whole.seconds * left, dollars=whole.dollars * left)


@dataclass(frozen=True, kw_only=True)
class _Past:
    """A build of the same kind of work."""

    name: str
    amount: float
    seconds: float
    processes: int

    def distance(self, work: Work) -> float:
        """Return how many times more or less work it was, 1 or more."""
        less, more = sorted((work.amount, self.amount))
        return more / less if less > 0 else math.inf


def _nearest(past: Sequence[_Past], work: Work) -> list[_Past]:
    """Return the builds whose amount of work is the nearest; several if theirs is the same."""
    least = min((each.distance(work) for each in past), default=0.0)
    return [each for each in past if each.distance(work) <= least * _EQUAL]


def _past(manifest: Manifest, kind: str, placement: Placement, device: str) -> _Past | None:
    """Return the build of an artifact, if it is of this kind, on such a machine, and has its times.

    That is: as many threads of a CPU, or a GPU of the same name where both names are known.
    """
    made = manifest.provenance
    seconds = sum(s.get("ended", 0) - s.get("started", 0) for s in made.segments)
    devices = {segment.get("device") for segment in made.segments}
    if made.work is None or made.work.kind != kind or devices != {device} or seconds <= 0:
        return None
    if device == "cuda":
        names = {made.metrics.get("device"), _gpu_of(placement)} - {None}
        is_alike = len(names) <= 1
    else:
        is_alike = {s.get("threads") for s in made.segments} <= {None, placement.resources.threads}
    if not is_alike:
        return None
    return _Past(
        name=manifest.name,
        amount=made.work.amount,
        seconds=seconds,
        processes=max([1, *(s.get("processes", 1) for s in made.segments)]),
    )


def _by_past(
    past: Sequence[_Past], work: Work, placement: Placement, device: str
) -> tuple[float, str]:
    """Return the median of the builds scaled to the work, and what they are."""
    processes = _processes(placement) if device == "cuda" else 1
    found = [each.seconds * work.amount / each.amount * each.processes / processes for each in past]
    if past[0].distance(work) > _EQUAL or any(each.processes != processes for each in past):
        return statistics.median(found), f"at the pace of {past[0].name}"
    builds = "last time" if len(past) == 1 else f"median of {len(past)} builds"
    return statistics.median(found), builds


def _measured(stage: Stage, work: Work) -> float | None:
    """Return the seconds of work like that of profile tiny; None: it is not like it."""
    seconds, reference = MEASURED.get(stage.name), measure_work(stage, tiny().run)
    if seconds is None or work.kind != reference.kind:
        return None
    ratio = work.amount / reference.amount
    return seconds * ratio if 1 / MAX_SCALED <= ratio <= MAX_SCALED else None


def _by_roofline(run: RunConfig, flops: float, placement: Placement) -> tuple[float | None, str]:
    processes = _processes(placement)
    if placement.gpus:
        pace = pretraining(run, _spec_of(placement), run.numerics.precision)
        if pace is None:
            return None, ""
        name = _gpu_of(placement)
        kind = f"{processes} x {name}" if name else "if H100s"
        return pace.gpu_seconds / processes, f"{kind}, at {pace.mfu:.0%} MFU by the roofline"
    rate = placement.resources.threads * _CPU_THREAD_FLOPS
    return flops / rate, f"no GPU: a guess, {_CPU_THREAD_FLOPS / 1e9:.0f} GFLOP/s a thread"


def _processes(placement: Placement) -> int:
    return max(placement.gpus, 1) * placement.nodes


def _gpu_of(placement: Placement) -> str | None:
    """Return the name of the GPUs that a run on this machine takes; None if it or its figures are
    not known."""
    name = None if placement.pool else gpu_name()
    return name if name and find_gpu_spec(name) else None


def _spec_of(placement: Placement) -> GpuSpec:
    spec = find_gpu_spec(_gpu_of(placement) or _ASSUMED)
    assert spec is not None
    return spec


def _price(stage: Stage, placement: Placement) -> tuple[float, str]:
    """Return dollars an hour, 0 if there is no price, and the words for one from the table."""
    price = placement.resources.dollars_per_hour
    if price or _device_for(stage, placement) == "cpu":
        return price, ""
    each = _spec_of(placement).dollars
    if each is None:
        return 0.0, ""
    return _processes(placement) * each, f", ${each:.2f} an hour each in {PRICES_OF}"


def _device_for(stage: Stage, placement: Placement) -> str:
    return "cuda" if stage.compute == "gpu" and placement.gpus else "cpu"
