"""How long a stage will take and what it will cost: as long as it took before, or by its FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from flows.identity.manifest import Manifest
from flows.stages import PRETRAIN, Stage
from infra.placement import Placement
from nanochat_core.config import ModelConfig, NumericsConfig, PretrainConfig, RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import flops_per_token

_H100_FLOPS = 989e12  # bf16, dense
_H100_MFU = 0.4  # of a d12; larger models do better
_CPU_THREAD_FLOPS = 3e10


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and money for what is left of a stage."""

    seconds: float
    dollars: float
    source: str  # where the numbers come from


def estimate(
    stage: Stage, run: RunConfig, history: Sequence[Manifest], placement: Placement
) -> Estimate | None:
    """For the whole stage, or None when nothing is known. `history`: likeliest first."""
    known = [m for m in history if _device(m) == _device_for(stage, placement) and _seconds(m) > 0]
    seconds, source = None, ""
    if stage is PRETRAIN:
        seconds, source = _by_flops(run, known, placement)
    elif known:
        seconds, source = _seconds(known[0]), "last time"
    if seconds is None:
        return None
    dollars = seconds / 3600 * placement.resources.dollars_per_hour
    return Estimate(seconds=seconds, dollars=dollars, source=source)


def remaining(whole: Estimate | None, *, step: int, total: int) -> Estimate | None:
    """What is left of `whole` after `step` of `total` steps."""
    if whole is None:
        return None
    left = 1 - step / total
    return replace(whole, seconds=whole.seconds * left, dollars=whole.dollars * left)


def _by_flops(run: RunConfig, known: Sequence[Manifest], placement: Placement) -> tuple[float, str]:
    flops = _training_flops(run.model, run.numerics, run.pretrain)
    processes = max(placement.gpus, 1)
    for manifest in known:
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
    except ConfigError:  # settings of another version
        return None


def _device_for(stage: Stage, placement: Placement) -> str:
    return "cuda" if stage.compute == "gpu" and placement.gpus else "cpu"


def _device(manifest: Manifest) -> str | None:
    """The device of all segments, None when they differ or do not say."""
    devices = {segment.get("device") for segment in manifest.provenance.segments}
    return devices.pop() if len(devices) == 1 else None


def _processes(manifest: Manifest) -> int:
    return max([1, *(s.get("processes", 1) for s in manifest.provenance.segments)])


def _seconds(manifest: Manifest) -> float:
    """Time spent in all segments; 0 when they do not say."""
    return sum(s.get("ended", 0) - s.get("started", 0) for s in manifest.provenance.segments)
