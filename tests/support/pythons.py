"""The other versions of Python on this machine that the package is for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_VERSION = "import sys; print(*sys.version_info[:2])"


def other_pythons() -> dict[str, Path]:
    """One interpreter of each other version from 3.11 on that this machine has."""
    names = [f"python3.{minor}" for minor in range(11, 20)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found = [path for path in found if path.parent.name != "shims"]  # slow, and for those below
    found += sorted(pyenv.glob("*/bin/python3"))
    pythons: dict[str, Path] = {}
    for path in found:
        command = [str(path), "-I", "-S", "-c", _VERSION]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            major, minor = map(int, done.stdout.split())
            if (major, minor) >= (3, 11) and (major, minor) != sys.version_info[:2]:
                pythons.setdefault(f"{major}.{minor}", path)
    return pythons


PYTHONS = other_pythons()
