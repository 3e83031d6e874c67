"""`nanochat infra`: the files for compose, systemd and clusters, as they are installed."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

import infra as package
from flows.cli.output import print_line
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

Kind: TypeAlias = Literal["compose", "systemd", "slurm", "kubernetes", "skypilot"]
_FOLDERS = {"compose": "containers"}  # the others have the name of their kind
# In a checkout the folders also have code, the Dockerfile, and copies of the examples with
# passwords: stack.env, which no pattern matches, and secrets.yaml.
_WRITTEN = ("*.example", "*.json", "*.sbatch", "*.service", "*.yaml", ".gitignore")
_FILLED_IN = "secrets.yaml"


def infra(
    kind: Kind,
    directory: Annotated[Path, Parameter(name="DIR")],
    /,
    *,
    force: bool = False,
) -> None:
    """Write the files for compose, systemd, Slurm, Kubernetes or SkyPilot into a directory.

    Files that are there and differ are not replaced without --force.

    Args:
        kind: What runs nanochat.
        directory: Directory to write into.
        force: Replace files that differ; each is named.
    """
    target = directory.expanduser()
    files = _files(kind)
    existing = {name for name in files if (target / name).is_file()}
    differing = {name for name in existing if (target / name).read_bytes() != files[name]}
    if differing and not force:
        raise ConfigError(
            f"{target} has other contents in {', '.join(sorted(differing))}",
            hint="choose another directory, or replace them with --force",
        )
    hint = "choose another directory, or move away what is there"
    for name, content in files.items():
        with writing(target / name, ConfigError, hint=hint):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in existing or name in differing:
                (target / name).write_bytes(content)
    for name in files:
        done = "replaced" if name in differing else "unchanged" if name in existing else "written"
        print_line(f"{done:<10}{target / name}")


def _files(kind: Kind) -> dict[str, bytes]:
    """Return what is written for a kind: path below the directory -> content."""
    source = Path(package.__file__).parent / _FOLDERS.get(kind, kind)
    return {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file()
        and path.name != _FILLED_IN
        and any(fnmatch(path.name, pattern) for pattern in _WRITTEN)
    }
