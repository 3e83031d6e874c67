"""Estimate the time and cost of a stage: from its last build, or from FLOPs for pretraining."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from flows.identity.manifest import Manifest
from flows.stages import PRETRAIN, Stage
from infra.placement import Placement, gpu_name
from nanochat_core.config import ModelConfig, NumericsConfig, PretrainConfig, RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.hardware.gpu_specs import peak_flops
from nanochat_core.scaling import flops_per_token

_ASSUMED = "NVIDIA H100"  # where no GPU of this machine says what it is
_MFU = 0.4  # of a d12; larger models do better
_H100_DOLLARS = 3.0  # an hour: an eighth of the $24 that nanochat counts for a node of 8, 2026-11
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

    `history` are artifacts of the stage, the most similar first; other devices are ignored.
    """
    # An artifact with no known duration (imported, or of an old format) says nothing.
    known = [m for m in history if _device(m) == _device_for(stage, placement) and _seconds(m) > 0]
    seconds, source = None, ""
    # The longest stage by far, and the last build may have had another depth: count FLOPs.
    if stage is PRETRAIN:
        seconds, source = _by_flops(run, known, placement)
    elif known:
        seconds, source = _seconds(known[0]), "last time"
    if seconds is None:
        return None
    price, assumed = _price(stage, placement)
    return Estimate(
        seconds=seconds,
        dollars=seconds / 3600 * price,
        source=source + assumed,
        on_gpus=_device_for(stage, placement) == "cuda",
    )


def remaining(whole: Estimate | None, *, step: int, total: int) -> Estimate | None:
    """Return the share of `whole` that is left after `step` of `total` steps."""
    if whole is None:
        return None
    left = 1 - step / total
    return replace(whole, seconds=whole.seconds * left, dollars=whole.dollars * left)


def _by_flops(run: RunConfig, known: Sequence[Manifest], placement: Placement) -> tuple[float, str]:
    flops = _training_flops(run.model, run.numerics, run.pretrain)
    processes = max(placement.gpus, 1) * placement.nodes
    for manifest in known:
        # FLOPs a second and process, evaluations and checkpoints included: assumed to scale.
        if past := _past_flops(manifest):
            rate = past / _seconds(manifest) / _processes(manifest)
            return flops / rate / processes, f"at the pace of {manifest.name}"
    if placement.gpus:
        name = _gpu_of(placement)
        peak = peak_flops(name or _ASSUMED)
        assert peak is not None
        kind = f"{processes} x {name}" if name else "if H100s"
        return flops / (processes * peak * _MFU), f"{kind}, at {_MFU:.0%} MFU"
    rate = placement.resources.threads * _CPU_THREAD_FLOPS
    return flops / rate, f"no GPU: a guess, {_CPU_THREAD_FLOPS / 1e9:.0f} GFLOP/s a thread"


def _gpu_of(placement: Placement) -> str | None:
    """Return the name of the GPUs that a run on this machine takes; None if it is not known, or its
    FLOP/s are not."""
    name = None if placement.pool else gpu_name()
    return name if name and peak_flops(name) else None


def _price(stage: Stage, placement: Placement) -> tuple[float, str]:
    """Return dollars an hour, 0 if there is no price, and the words for an assumed one."""
    price = placement.resources.dollars_per_hour
    is_h100 = "H100" in (_gpu_of(placement) or _ASSUMED)
    if price or not is_h100 or _device_for(stage, placement) == "cpu":
        return price, ""
    gpus = placement.gpus * placement.nodes
    return gpus * _H100_DOLLARS, f", ${_H100_DOLLARS:.0f} an hour each"


def _training_flops(
    model: ModelConfig, numerics: NumericsConfig, pretrain: PretrainConfig
) -> float:
    tokens = pretrain.num_steps * pretrain.total_batch_size
    return float(flops_per_token(model, numerics)) * tokens


def _past_flops(manifest: Manifest) -> float | None:
    config = cast("dict[str, Any]", manifest.preimage["config"])
    try:
        model = ModelConfig.from_tree(config["model"])
        numerics = NumericsConfig.from_tree(config["numerics"])
        return _training_flops(model, numerics, PretrainConfig.from_tree(config["pretrain"]))
    except ConfigError:  # written by another version, with other settings
        return None


def _device_for(stage: Stage, placement: Placement) -> str:
    return "cuda" if stage.compute == "gpu" and placement.gpus else "cpu"


def _device(manifest: Manifest) -> str | None:
    """Return the device of all executions. None if they differ or do not record it."""
    devices = {segment.get("device") for segment in manifest.provenance.segments}
    return devices.pop() if len(devices) == 1 else None


def _processes(manifest: Manifest) -> int:
    return max([1, *(s.get("processes", 1) for s in manifest.provenance.segments)])


def _seconds(manifest: Manifest) -> float:
    """Return the seconds spent in all executions; 0 if they do not record it."""
    return sum(s.get("ended", 0) - s.get("started", 0) for s in manifest.provenance.segments)
