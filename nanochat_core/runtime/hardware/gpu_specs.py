"""What is known of GPUs by their names: peak FLOP/s, memory, and the price of an hour.

FLOP/s are dense, with fp32 accumulation, from the vendors' data sheets. MFU is the share of those
in bf16, nanochat's convention, so that a faster format shows as a higher MFU.
"""

from dataclasses import dataclass

# Of RunPod's Secure Cloud on demand, which lists most of these; October and November 2026.
PRICES_OF = "2026-11"


@dataclass(frozen=True)
class GpuSpec:
    """One kind of GPU."""

    name: str  # a part of torch's name for the device
    bf16: float  # FLOP/s
    fp8: float | None  # FLOP/s; None: it has no fp8
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    dollars: float | None = None  # an hour; None: no price is known


def _spec(
    name: str,
    bf16: float,
    fp8: float | None,
    bandwidth: float,
    memory: float,
    dollars: float | None = None,
) -> GpuSpec:
    """Return a GPU from teraFLOP/s, TB/s and GB."""
    in_fp8 = None if fp8 is None else fp8 * 1e12
    return GpuSpec(name, bf16 * 1e12, in_fp8, bandwidth * 1e12, memory * 1e9, dollars)


# The first match counts, so a name that contains another comes before it ("H100 PCIe" before
# "H100").
GPUS = (
    _spec("B300", 2250, 4500, 8.0, 270, 7.89),
    _spec("GB200", 2500, 5000, 8.0, 186),
    _spec("B200", 2250, 4500, 8.0, 180, 6.79),
    _spec("GH200", 989, 1979, 4.0, 96),
    _spec("H200", 989, 1979, 4.8, 141, 4.59),
    _spec("H100 NVL", 835, 1671, 3.9, 94, 3.19),
    _spec("H100 PCIe", 756, 1513, 2.0, 80, 2.89),
    _spec("H100", 989, 1979, 3.35, 80, 3.99),
    _spec("H800", 989, 1979, 3.35, 80),
    _spec("A100-SXM4-40GB", 312, None, 1.555, 40),
    _spec("A100-PCIE-40GB", 312, None, 1.555, 40),
    _spec("A100", 312, None, 1.935, 80, 1.79),
    _spec("A800", 312, None, 1.935, 80),
    _spec("L40S", 362, 733, 0.864, 48),
    _spec("L40", 181, 362, 0.864, 48),
    _spec("L4", 121, 242, 0.3, 24),
    _spec("RTX 5090", 209.5, 419, 1.792, 32),
    _spec("RTX 4090", 165.2, 330.3, 1.008, 24),
    _spec("RTX 3090", 71, None, 0.936, 24),
)


def find_gpu_spec(name: str) -> GpuSpec | None:
    """Return what is known of a GPU that torch calls `name`; None if nothing, as of a CPU."""
    return next((spec for spec in GPUS if spec.name in name), None)


def peak_flops(name: str) -> float | None:
    """Return the FLOP/s in bf16 of a GPU that torch calls `name`; None if unknown."""
    spec = find_gpu_spec(name)
    return spec.bf16 if spec else None
