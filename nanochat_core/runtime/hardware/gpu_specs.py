"""Peak FLOP/s of GPUs by name: the denominator of MFU.

Dense bf16 with fp32 accumulation, from the vendors' data sheets. fp8 is measured against the same
number, nanochat's convention, so that a faster format shows as a higher MFU.
"""

# A part of torch's name for the device -> teraFLOP/s. The first match counts, so a name that
# contains another comes before it ("H100 PCIe" before "H100").
_TERAFLOPS = (
    ("B300", 2250.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_flops(name: str) -> float | None:
    """Return the FLOP/s of a GPU that torch calls `name`; None if unknown, as for a CPU."""
    return next((tera * 1e12 for part, tera in _TERAFLOPS if part in name), None)
