"""The other versions of Python on this machine that the package is for."""

import os
import shutil
import sys
from pathlib import Path


def other_pythons() -> dict[str, Path]:
    """Return one interpreter of each other version from 3.11 on that this machine has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pythons: dict[str, Path] = {}
    for version in (f"3.{minor}" for minor in range(11, 20) if minor != sys.version_info.minor):
        found = sorted(pyenv.glob(f"{version}.*/bin/python3"))
        usual = shutil.which(f"python{version}")
        if usual and Path(usual).parent.name != "shims":  # slow, and for those of pyenv
            found.insert(0, Path(usual))
        if found:
            pythons[version] = found[0]
    return pythons


PYTHONS = other_pythons()
