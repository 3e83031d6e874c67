"""What is known of GPUs by their names: peak FLOP/s, memory, and the price of an hour.

FLOP/s are dense, with fp32 accumulation, from the vendors' data sheets. MFU is the share of those
in bf16, nanochat's convention, so that a faster format shows as a higher MFU.
"""

import difflib
import re
from dataclasses import dataclass

# Of RunPod's Secure Cloud on demand, which lists most of these; October and November 2026.
PRICES_OF = "2026-11"


@dataclass(frozen=True)
class GpuSpec:
    """One kind of GPU."""

    name: str
    bf16: float  # FLOP/s
    fp8: float | None  # FLOP/s; None: it has no fp8
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    dollars: float | None = None  # an hour; None: no price is known
    also: tuple[str, ...] = ()  # other names


def _spec(
    name: str,
    bf16: float,
    fp8: float | None,
    bandwidth: float,
    memory: float,
    dollars: float | None = None,
    also: tuple[str, ...] = (),
) -> GpuSpec:
    """Return a GPU from teraFLOP/s, TB/s and GB."""
    in_fp8 = None if fp8 is None else fp8 * 1e12
    return GpuSpec(name, bf16 * 1e12, in_fp8, bandwidth * 1e12, memory * 1e9, dollars, also)


GPUS = (
    _spec("B300", 2250, 4500, 8.0, 270, 7.89),
    _spec("GB200", 2500, 5000, 8.0, 186),
    _spec("B200", 2250, 4500, 8.0, 180, 6.79),
    _spec("GH200", 989, 1979, 4.0, 96, also=("GH200 480GB", "GH200 120GB")),
    _spec("GH200 144GB", 989, 1979, 4.9, 144),
    _spec("H200", 989, 1979, 4.8, 141, 4.59),
    _spec("H200 NVL", 835, 1671, 4.8, 141),
    _spec("H100 NVL", 835, 1671, 3.9, 94, 3.19),
    _spec("H100 PCIe", 756, 1513, 2.0, 80, 2.89),
    _spec("H100", 989, 1979, 3.35, 80, 3.99),
    _spec("H800", 989, 1979, 3.35, 80),
    _spec("A100-SXM4-40GB", 312, None, 1.555, 40, also=("A100 40GB",)),
    _spec("A100-PCIE-40GB", 312, None, 1.555, 40),
    _spec("A100", 312, None, 1.935, 80, 1.79, also=("A100 PCIe",)),
    _spec("A800", 312, None, 1.935, 80, also=("A800 PCIe",)),
    _spec("L40S", 362, 733, 0.864, 48, also=("L40S PCIe",)),
    _spec("L40", 181, 362, 0.864, 48, also=("L40 PCIe",)),
    _spec("L4", 121, 242, 0.3, 24, also=("L4 PCIe",)),
    _spec("RTX A6000", 154.8, None, 0.768, 48),
    _spec("RTX 5090", 209.5, 419, 1.792, 32),
    _spec("RTX 5070", 61.7, 123.5, 0.672, 12),
    _spec("RTX 4090", 165.2, 330.3, 1.008, 24),
    _spec("RTX 4070", 58.3, 116.6, 0.504, 12),
    _spec("RTX 4060", 30.2, 60.5, 0.272, 8),
    _spec("RTX 3090", 71, None, 0.936, 24),
    _spec("RTX 3060", 25.4, None, 0.36, 12),
    _spec("MI300X", 1307.4, 2614.9, 5.3, 192),
    # These have no bf16: their FLOP/s are those of fp16.
    _spec("V100-SXM2-16GB", 125, None, 0.9, 16, also=("V100",)),
    _spec("V100-SXM2-32GB", 125, None, 0.9, 32, also=("V100 32GB",)),
    _spec("V100-PCIE-16GB", 112, None, 0.9, 16, also=("V100 PCIe",)),
    _spec("V100-PCIE-32GB", 112, None, 0.9, 32),
    _spec("T4", 65, None, 0.3, 16, also=("T4 PCIe",)),
)

_MAKERS = frozenset(
    ("nvidia", "amd", "geforce", "rtx", "tesla", "quadro", "instinct", "radeon", "gpu")
)
_FORM = re.compile(r"sxm\d?|oam|ac|hbm\d?e?")  # how a GPU is mounted, or its memory's kind
_MEMORY = re.compile(r"(\d+)gb?")


def find_gpu_spec(name: str) -> GpuSpec | None:
    """Return what is known of a GPU by torch's name or an alias; None if nothing, as of a CPU.

    A name with a word more than the table's is another GPU (Ti, SUPER, Laptop, MIG, PCIe), unless
    the word says how else it is mounted or how much memory the table's GPU has.
    """
    words, memory = _words_and_memory(name)
    for known, spec in _NAMES:
        known_words, known_memory = _words_and_memory(known)
        if words == known_words and memory in (known_memory, {spec.memory / 1e9}):
            return spec
    return None


def nearest_gpus(name: str) -> list[str]:
    """Return up to three names of the table: first of the same chip, then the most like `name`."""
    chip = _words_and_memory(name)[0] - {"pcie", "nvl"}
    same = [spec.name for known, spec in _NAMES if chip & _words_and_memory(known)[0]]
    near = difflib.get_close_matches("".join(_words(name)), _BY_NAME, n=3, cutoff=0.5)
    return list(dict.fromkeys((*same, *(_BY_NAME[key].name for key in near))))[:3]


def peak_flops(name: str) -> float | None:
    """Return the FLOP/s in bf16 of a GPU that torch calls `name`; None if unknown."""
    spec = find_gpu_spec(name)
    return spec.bf16 if spec else None


def _words(name: str) -> list[str]:
    """Return the words of a name that distinguish GPUs: "NVIDIA GeForce RTX 4090" is 4090."""
    words = re.split(r"[\s\-_/]+", name.lower().strip())
    return [short for word in words if word not in _MAKERS and (short := word.removeprefix("rtx"))]


def _words_and_memory(name: str) -> tuple[set[str], set[int]]:
    """Return the words in any order, but those of the form, and the GB that the name says."""
    words = {word for word in _words(name) if not _FORM.fullmatch(word)}
    sizes = {word: int(found[1]) for word in words if (found := _MEMORY.fullmatch(word))}
    return words - sizes.keys(), set(sizes.values())


_NAMES = [(name, spec) for spec in GPUS for name in (spec.name, *spec.also)]
_BY_NAME = {"".join(_words(name)): spec for name, spec in _NAMES}
