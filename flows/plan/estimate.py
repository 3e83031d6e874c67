"""Estimate the time and cost of a stage: from its nearest builds, else by the roofline."""

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

# Seconds of tiny's stages, which a first plan of it on a CPU shows: `nanochat run tiny`
# on an idle AMD EPYC with AVX-512, one thread, 2026-11-30. Slower CPUs take longer.
MEASURED = {
    "shards": 1.6,
    "task_data": 2.8,
    "tokenizer": 0.3,
    "tokens": 0.66,
    "rows": 0.23,
    "pretrain": 3.9,
    "base_eval": 1.6,
    "midtrain": 17.0,
    "sft": 62.0,
    "rl": 2.4,
    "chat_eval_midtrain": 2.2,
    "chat_eval_sft": 2.1,
    "chat_eval_rl": 2.1,
    "report": 0.8,
}
MAX_SCALED = 10.0  # times more or less work than a build did; overheads do not scale
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
    """Return an estimate of the whole stage. None means that nothing like it was timed.

    `history` are artifacts of the stage, in any order. Only builds of the same kind of work (see
    work.py) on such a machine count, and of these the ones whose amount of work is the nearest,
    up to MAX_SCALED times off. Without any, profile tiny on a CPU takes what was measured, and
    pretraining what the roofline says.
    """
    work, device = measure_work(stage, run), _device_for(stage, placement)
    found = _by_builds(history, work, placement, device)
    measured = MEASURED.get(stage.name) if device == "cpu" else None
    if found is None and measured is not None and work == measure_work(stage, tiny().run):
        found = measured, "as measured on one core"
    if found is None and stage is PRETRAIN:
        found = _by_roofline(run, work.amount, placement)
    if found is None:
        return None
    seconds, source = found
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


def _by_builds(
    history: Sequence[Manifest], work: Work, placement: Placement, device: str
) -> tuple[float, str] | None:
    """Return the median of the nearest builds, scaled to the work, and what they are."""
    alike = [m for m in history if _is_alike(m, work.kind, placement, device)]
    # How many times more or less work each was, 1 or more.
    off = [max(_ratio(m, work), 1 / _ratio(m, work)) for m in alike]
    least = min(off, default=MAX_SCALED + 1)
    if least > MAX_SCALED:
        return None
    nearest = [m for m, each in zip(alike, off, strict=True) if each <= least * _EQUAL]
    ours = _processes(placement) if device == "cuda" else 1
    theirs = [max(s.get("processes", 1) for s in m.provenance.segments) for m in nearest]
    seconds = statistics.median(
        m.provenance.seconds * _ratio(m, work) * processes / ours
        for m, processes in zip(nearest, theirs, strict=True)
    )
    if least > _EQUAL or set(theirs) != {ours}:
        return seconds, f"at the pace of {nearest[0].name}"
    return seconds, "last time" if len(nearest) == 1 else f"median of {len(nearest)} builds"


def _is_alike(manifest: Manifest, kind: str, placement: Placement, device: str) -> bool:
    """Return whether an artifact is of this kind of work, and its build on such a machine timed.

    That is: as many threads of a CPU, or a GPU of the same name where both names are known.
    """
    made = manifest.provenance
    devices = {segment.get("device") for segment in made.segments}
    if made.work is None or made.work.kind != kind or devices != {device}:
        return False
    if made.work.amount <= 0 or made.seconds <= 0:
        return False
    if device == "cuda":
        return len({made.metrics.get("device"), _gpu_of(placement)} - {None}) <= 1
    return {s.get("threads") for s in made.segments} <= {None, placement.resources.threads}


def _ratio(manifest: Manifest, work: Work) -> float:
    """Return how many times the work of a build `work` is."""
    made = manifest.provenance.work
    assert made is not None
    return work.amount / made.amount


def _by_roofline(run: RunConfig, flops: float, placement: Placement) -> tuple[float, str] | None:
    processes = _processes(placement)
    if placement.gpus:
        pace = pretraining(run, _spec_of(placement), run.numerics.precision)
        if pace is None:
            return None
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
