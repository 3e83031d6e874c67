"""Estimate the time and cost of a stage: from its last build, or from FLOPs for pretraining."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from flows.identity.manifest import Manifest
from flows.stages import PRETRAIN, Stage
from infra.placement import Placement
from nanochat_core.config import ModelConfig, NumericsConfig, PretrainConfig, RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import flops_per_token

_H100_FLOPS = 989e12  # a second; bf16, dense: NVIDIA's data sheet of the H100 SXM
_H100_MFU = 0.4  # of a d12; larger models do better
_CPU_THREAD_FLOPS = 3e10  # a second, fp32: a guess for one core


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and money for what is left of a stage."""

    seconds: float
    dollars: float
    source: str  # where the numbers come from


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
    dollars = seconds / 3600 * placement.resources.dollars_per_hour
    return Estimate(seconds=seconds, dollars=dollars, source=source)


def remaining(whole: Estimate | None, *, step: int, total: int) -> Estimate | None:
    """Return the share of `whole` that is left after `step` of `total` steps."""
    if whole is None:
        return None
    left = 1 - step / total
    return replace(whole, seconds=whole.seconds * left, dollars=whole.dollars * left)


def _by_flops(run: RunConfig, known: Sequence[Manifest], placement: Placement) -> tuple[float, str]:
    flops = _training_flops(run.model, run.numerics, run.pretrain)
    processes = max(placement.gpus, 1)
    for manifest in known:
        # FLOPs a second and process, evaluations and checkpoints included: assumed to scale.
        if past := _past_flops(manifest):
            rate = past / _seconds(manifest) / _processes(manifest)
            return flops / rate / processes, f"at the pace of {manifest.name}"
    if placement.gpus:
        rate = placement.gpus * _H100_FLOPS * _H100_MFU
        return flops / rate, f"if H100s, at {_H100_MFU:.0%} MFU"
    rate = placement.resources.threads * _CPU_THREAD_FLOPS
    return flops / rate, f"no GPU: a guess, {_CPU_THREAD_FLOPS / 1e9:.0f} GFLOP/s a thread"


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
