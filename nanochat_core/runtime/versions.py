"""Versions of the software behind a result: recorded with the artifact, not in its identity."""

import importlib.metadata
import platform
import sys

_PACKAGES = ("torch", "numpy", "pyarrow", "tiktoken", "rustbpe")
_NOTED: dict[str, str] = {}


def note_version(name: str, version: str) -> None:
    """Record a version that no package has, such as that of the compiler of our kernels."""
    _NOTED[name] = version


def versions_in_use() -> dict[str, str]:
    """Return name -> version: Python, the packages that this process loaded, and noted ones."""
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in _PACKAGES if name in sys.modules}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["cuda"] = str(torch.version.cuda)
    return found | _NOTED
