"""Where a run executes and how fast. Nothing here ever changes a result's identity."""

import dataclasses
import json
import math
import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanochat_core.errors import ConfigError
from nanochat_core.job import Determinism, Resources
from nanochat_core.section import from_json

# Names of what watches metrics besides; each is a package that has to be installed.
SINKS = ("trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Store, machine and pace of a run."""

    home: Path  # work directories, fetched artifacts, Prefect's database
    store: str  # URL of the artifact store: file:///path or s3://bucket/prefix
    gpus: int  # processes of a GPU stage; 0: one process on the CPU
    threads: int  # CPU threads of one process
    device_batch_size: int
    save_every_seconds: float
    eval_every_steps: int
    dollars_per_hour: float
    # What these mean is said at `Resources`, where their defaults are.
    save_every_steps: int = Resources.save_every_steps
    keep_checkpoints: int = Resources.keep_checkpoints
    hang_seconds: float = Resources.hang_seconds
    retry_smaller_batch: bool = Resources.retry_smaller_batch
    attention: str = Resources.attention
    compile: bool = Resources.compile
    determinism: Determinism = Resources.determinism
    sinks: tuple[str, ...] = Resources.sinks

    @property
    def resources(self) -> Resources:
        """The part that a job sees."""
        names = [field.name for field in dataclasses.fields(Resources) if field.name != "device"]
        return Resources(
            device="cuda" if self.gpus else "cpu", **{name: getattr(self, name) for name in names}
        )

    @property
    def mirrors_checkpoints(self) -> bool:
        """Whether checkpoints go to the store too: not when it lies in the home, as they do."""
        return not self.store.startswith(f"{self.home.as_uri()}/")


def with_settings(placement: Placement, settings: Sequence[str]) -> Placement:
    """The placement with each `name=value` of `settings` in it.

    Raises ConfigError for a name that is no setting of the placement, and for a value of the wrong
    kind or out of range.
    """
    types_by_name = typing.get_type_hints(Placement)
    fixed = ("home", "store", "gpus", "threads")  # these have options of their own
    known = [name for name in types_by_name if name not in fixed]
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"'{setting}' does not set anything of the placement",
                hint=f"did you mean '{close[0]}=...'?" if close else f"one of: {', '.join(known)}",
            )
        expected = types_by_name[name]
        if typing.get_origin(expected) is typing.Literal or expected is str:
            changes[name] = text
        else:
            changes[name] = from_json(expected, _parse(text), where=name)
    changed = dataclasses.replace(placement, **changes)
    _check(changed)
    return changed


_LEAST = {
    "device_batch_size": 1,
    "save_every_seconds": 0,
    "save_every_steps": 0,
    "eval_every_steps": 0,
    "keep_checkpoints": 1,
    "dollars_per_hour": 0,
    "hang_seconds": 1,
}


def _check(placement: Placement) -> None:
    for name, least in _LEAST.items():
        if (value := getattr(placement, name)) < least:
            raise ConfigError(f"{name} is {value}", hint=f"at least {least}")
    if placement.determinism not in (allowed := typing.get_args(Determinism)):
        raise ConfigError(
            f"determinism is '{placement.determinism}'", hint=f"one of: {', '.join(allowed)}"
        )
    for sink in placement.sinks:
        if sink not in SINKS:
            raise ConfigError(f"there is no sink '{sink}'", hint=f"one of: {', '.join(SINKS)}")


def _parse(text: str) -> Any:
    """Text as a JSON value, else as the string it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def default_sinks() -> tuple[str, ...]:
    """NANOCHAT_SINKS, names with commas between them; by default none."""
    return tuple(name for name in os.environ.get("NANOCHAT_SINKS", "").split(",") if name)


def default_home() -> Path:
    """NANOCHAT_HOME, else ~/.nanochat-flows."""
    return Path(os.environ.get("NANOCHAT_HOME") or Path.home() / ".nanochat-flows").absolute()


def default_store(home: Path) -> str:
    """NANOCHAT_STORE, else a directory in `home`."""
    return os.environ.get("NANOCHAT_STORE") or (home / "store").as_uri()


def default_cache_limit() -> int:
    """Bytes of fetched artifacts to keep on this machine: NANOCHAT_CACHE_GB, else 100 GB."""
    given = os.environ.get("NANOCHAT_CACHE_GB") or "100"
    try:
        gigabytes = float(given)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(
            f"NANOCHAT_CACHE_GB is '{given}'", hint="gigabytes as a number, for example 100"
        )
    return int(gigabytes * 1e9)


def count_gpus() -> int:
    """NVIDIA devices of this machine, without loading torch or a driver library."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def count_threads() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
