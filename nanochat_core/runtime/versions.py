"""What computed a result, software and processor: recorded with the artifact, not in its identity.

Of a divergence between two machines they say whether the processor is another: libraries choose
their instructions by it, and results are then equal up to rounding only.
"""

import importlib.metadata
import platform
import sys
from contextlib import suppress
from pathlib import Path

_PACKAGES = ("torch", "numpy", "pyarrow", "tiktoken", "rustbpe")
_NOTED: dict[str, str] = {}


def note_version(name: str, version: str) -> None:
    """Record a version that no package has, such as that of the compiler of our kernels."""
    _NOTED[name] = version


def versions_in_use() -> dict[str, str]:
    """Return name -> version: Python, processor, packages that this process loaded, noted ones."""
    found = {"python": platform.python_version(), "processor": processor_name()}
    found |= {name: importlib.metadata.version(name) for name in _PACKAGES if name in sys.modules}
    torch = sys.modules.get("torch")
    if torch is not None:
        # The instructions that torch's kernels use here: AVX512, AVX2, ... or DEFAULT.
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_initialized():
            found["cuda"] = str(torch.version.cuda)
    return found | _NOTED


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's product name, or its architecture where it has no other."""
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine() or "unknown"
