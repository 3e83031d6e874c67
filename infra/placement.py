"""The placement of a run: its store, machine and pace, which never change a result's identity."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.near import suggest
from nanochat_core.errors import ConfigError
from nanochat_core.job import ATTENTION_PACKAGES, TRACKERS, Resources
from nanochat_core.section import from_json

# The package that a tracker or an attention backend needs, and how to install it.
_OPTIONAL = {
    "trackio": ("trackio", "pip install 'nanochat-flows[trackers]'"),
    "wandb": ("wandb", "pip install 'nanochat-flows[trackers]'"),
    **ATTENTION_PACKAGES,
}

# The names that `--place` accepts: every field of Resources but the device, which follows from the
# number of GPUs.
SETTINGS = tuple(field.name for field in dataclasses.fields(Resources) if field.name != "device")

# The work pool whose workers run the flows; `nanochat up` makes it.
CPU_POOL = "cpu"
NO_POOL = "none"  # asks for none where a default names one

POOL_NAME = r"[^/%&><\s]{1,100}"  # Prefect's own rule, and no spaces
ONE_STAGE = "one-stage"  # the flow of flows/orchestration/one_stage.py

_AMD_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# The smallest allowed value of each numeric setting.
_LEAST = {
    "threads": 1,
    "device_batch_size": 1,
    "save_every_seconds": 0,
    "save_every_steps": 0,
    "eval_every_steps": 0,
    "keep_checkpoints": 1,
    "dollars_per_hour": 0,
    "hang_seconds": 1,
    "grace_seconds": 6,
}
_FORMS = {int: "a whole number, like 8", float: "a number, like 2.5", bool: "true or false"}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Store, machine and pace of a run."""

    home: Path  # work directories, fetched artifacts, Prefect's database
    store: str  # URL of the artifact store: file:///path or s3://bucket/prefix
    gpus: int  # processes of a GPU stage on each node; 0: one process on the CPU
    resources: Resources  # the part that a job sees
    nodes: int = 1  # machines that a GPU stage takes
    pool: str | None = None  # Prefect work pool whose workers run GPU stages; None: this machine

    @property
    def mirrors_checkpoints(self) -> bool:
        """True if checkpoints are copied to the store; False if the store is in the home too."""
        # With the slash: a store in /data/home2 is not inside the home /data/home.
        return not self.store.startswith(f"{self.home.as_uri()}/")


def check_pool_name(pool: str) -> None:
    """Raise ConfigError unless a work pool can have this name."""
    if not re.fullmatch(POOL_NAME, pool) or pool == NO_POOL:
        raise ConfigError(
            f"{pool!a} cannot be the name of a work pool",
            hint="at most 100 characters, without spaces and / % & < >, such as gpu-a100",
        )


def unknown_pool(pool: str) -> ConfigError:
    """Return the error for a pool that no stage can be requested from."""
    return ConfigError(
        f"no stage can be requested from the pool '{pool}': it has no deployment "
        f"{ONE_STAGE}/{pool}",
        hint=f"register it with: nanochat up --register --pool {pool}",
    )


def check_gpu_pool(pool: str, *, own: str | None = None) -> None:
    """Raise ConfigError for a wrong name, and for a pool of flows: `cpu`, or the caller's `own`.

    A flow holds its worker's slot while it waits for its GPU stages. In one pool, as many flows as
    slots would deadlock: every stage waits for a slot that no flow releases.
    """
    check_pool_name(pool)
    if pool in (CPU_POOL, own):
        raise ConfigError(
            f"GPU stages cannot run in the work pool '{pool}': flows run there, and would wait "
            "for their own slots",
            hint="name a pool whose workers build stages only, such as gpu",
        )


def device_for(gpus: int) -> str:
    """Return the device of jobs with this number of GPUs."""
    return "cuda" if gpus else "cpu"


def with_settings(resources: Resources, settings: Sequence[str]) -> Resources:
    """Return the resources changed by each `name=value` of `settings`.

    Raises ConfigError for a name that is not in SETTINGS, for a value of the wrong type or out of
    range, and for two values of one name.
    """
    types_by_name = typing.get_type_hints(Resources)
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in SETTINGS:
            raise ConfigError(
                f"'{setting}' does not set anything of the placement",
                hint=suggest(name, SETTINGS, form="{}=..."),
            )
        kind = types_by_name[name]
        value: Any = (
            _read_sinks(name, text) if name == "sinks" else read_value(kind, text, where=name)
        )
        # The same value twice is harmless: an option of its own may repeat what --place says.
        if changes.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} is set twice: to {_shown(changes[name])} and to {_shown(value)}",
                hint="give it once, with --place or as an option of its own",
            )
        if name in _LEAST and value < _LEAST[name]:
            raise ConfigError(f"{name} is {value}", hint=f"at least {_LEAST[name]}")
    return dataclasses.replace(resources, **changes)


def missing_packages(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return what trackers and attention backends lack on this machine, each with its remedy."""
    wanted = ((name, *_OPTIONAL[name]) for name in names if name in _OPTIONAL)
    return [
        (f"{name} needs the package {package}, which is not installed here", remedy)
        for name, package, remedy in wanted
        if importlib.util.find_spec(package) is None
        and not any(importlib.metadata.distributions(name=package))
    ]


def read_value(expected: Any, text: str, *, where: str) -> Any:
    """Return the value of a setting of this type. Raises ConfigError if the text has another."""
    if typing.get_origin(expected) is typing.Literal:
        allowed = {_shown(value): value for value in typing.get_args(expected)}
        if text not in allowed:
            raise ConfigError(f"{where} is '{text}'", hint=f"one of: {', '.join(allowed)}")
        return allowed[text]
    try:
        return from_json(expected, parse_value(expected, text), where=where)
    except ConfigError as error:
        # The message names the expected type; the hint shows how to write it.
        error.hint = error.hint or _FORMS.get(expected)
        raise


def parse_value(expected: Any, text: str) -> Any:
    """Return text as the JSON value of a setting; unchanged if its type is text, or if not JSON."""
    may_be_null = isinstance(expected, types.UnionType) and str in typing.get_args(expected)
    if expected is str or (may_be_null and text != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return text  # from_json reports the expected type


def _read_sinks(name: str, text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once."""
    sinks = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for sink in sinks:
        if sink not in TRACKERS:
            raise ConfigError(
                f"{name} is '{text}': there is no sink '{sink}'",
                hint=f"{' or '.join(TRACKERS)}, or both with a comma between them",
            )
    return sinks


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(typing.cast(tuple[str, ...], value)) or "none"
    return json.dumps(value).strip('"')


def default_sinks() -> tuple[str, ...]:
    """Return the names in NANOCHAT_SINKS, a comma-separated list; by default none."""
    return _read_sinks("NANOCHAT_SINKS", os.environ.get("NANOCHAT_SINKS", ""))


def default_home() -> Path:
    """Return NANOCHAT_HOME, else ~/.nanochat-flows if that exists or XDG_DATA_HOME is not set.

    Else nanochat-flows in XDG_DATA_HOME, which the XDG base directory specification ignores if it
    is not absolute.
    """
    # A file of variables, or quotes, leave the ~ to us: it must not become a folder of that name.
    if given := os.environ.get("NANOCHAT_HOME"):
        return Path(given).expanduser().absolute()
    usual, data = Path("~/.nanochat-flows").expanduser(), os.environ.get("XDG_DATA_HOME", "")
    if usual.exists() or not Path(data).is_absolute():
        return usual.absolute()
    return Path(data) / "nanochat-flows"


def default_store(home: Path) -> str:
    """Return NANOCHAT_STORE, else a directory in `home`."""
    return os.environ.get("NANOCHAT_STORE") or (home / "store").as_uri()


def default_cache_limit() -> int:
    """Return the size limit of cached artifacts in bytes: NANOCHAT_CACHE_GB, else 100 GB."""
    given = os.environ.get("NANOCHAT_CACHE_GB") or "100"
    try:
        gigabytes = float(given)
    except ValueError:
        gigabytes = math.nan
    # False for NaN too, which float() accepts as text.
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(
            f"NANOCHAT_CACHE_GB is '{given}'", hint="gigabytes as a number, for example 100"
        )
    return int(gigabytes * 1e9)


def count_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs that this process may use, or of AMD GPUs where torch is
    built for ROCm. torch is not loaded.

    Slurm and other schedulers share a machine by CUDA_VISIBLE_DEVICES (AMD: also
    HIP_VISIBLE_DEVICES). `root` is the root of the file system.
    """
    present, variables = len(list(root.glob("dev/nvidia[0-9]*"))), ("CUDA_VISIBLE_DEVICES",)
    if not present:
        present, variables = _count_amd(root), _AMD_VISIBLE
    values = [os.environ[name] for name in variables if name in os.environ]
    return min([present, *(_count_visible(value, present) for value in values)])


def gpu_name(root: Path = Path("/")) -> str | None:
    """Return the name of this machine's first NVIDIA GPU, as torch has it, or None."""
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return None


def _count_amd(root: Path) -> int:
    """Return the number of AMD GPUs; 0 if torch cannot use them, as next to an integrated one."""
    nodes = list(root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
    if not nodes or not _has_rocm():
        return 0
    count = 0
    for node in nodes:
        with contextlib.suppress(OSError):  # in a container: the GPU of another one
            count += node.read_text().strip() not in ("", "0")  # 0: a CPU
    return count


def _has_rocm() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return "rocm" in importlib.metadata.version("torch")
    return False


def _count_visible(devices: str, present: int) -> int:
    """Return how many devices CUDA shows for a value of CUDA_VISIBLE_DEVICES.

    Entries are numbers or UUIDs. The first that names no device ends the list, and of the instances
    of divided GPUs (MIG) a process sees one.
    """
    count = 0
    for name in (name.strip() for name in devices.split(",")):
        if name.startswith("MIG-"):
            return 1
        is_device = int(name) < present if name.isdecimal() else name.startswith("GPU-")
        if not is_device:
            break
        count += 1
    return count


def count_threads() -> int:
    """Return the number of CPUs that this process may use."""
    # In a container or under Slurm that may be fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
