"""Where a run executes and how fast. Nothing here ever changes a result's identity."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from nanochat_core.errors import ConfigError
from nanochat_core.job import Resources


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

    @property
    def resources(self) -> Resources:
        """The part that a job sees."""
        return Resources(
            device="cuda" if self.gpus else "cpu",
            threads=self.threads,
            device_batch_size=self.device_batch_size,
            save_every_seconds=self.save_every_seconds,
            eval_every_steps=self.eval_every_steps,
            dollars_per_hour=self.dollars_per_hour,
        )

    @property
    def mirrors_checkpoints(self) -> bool:
        """Whether checkpoints go to the store too: not when it lies in the home, as they do."""
        return not self.store.startswith(f"{self.home.as_uri()}/")


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
