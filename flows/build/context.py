"""What all stages of one run share: what is built, where, and who is told of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from flows.artifacts.cache import Cache
from flows.identity.fingerprint import REPOSITORY
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait
from flows.leases.queue import DeviceSlot
from infra.placement import Placement, default_cache_limit
from infra.storage.base import Store
from nanochat_core.config import RunConfig

# Called with a stage's name and an event, from the thread that builds the stage. Kinds of event
# beside those of runtime.progress:
#
#     cached    {"uri"}                    the artifact exists; nothing was done
#     waiting   {"text"}                   for another process; said now and again
#     fetching  {"inputs"}                 names of stages
#     building  {"fingerprint", "processes", "directory"}   the job starts, in its directory
#     warning   {"text"}
#     finished  {"uri", "seconds", "metrics"}
#     failed    {"error", "hint", "log_tail"}   hint: None when there is none
#     interrupted {}
Watch: TypeAlias = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What all stages of one run share: what is built, where, and who is told."""

    run: RunConfig
    run_id: str  # recorded as who built it
    placement: Placement
    store: Store
    watch: Watch
    strict: bool  # whether code that the fingerprint did not see is an error
    root: Path = REPOSITORY  # where the packages lie
    terms: LeaseTimings = LeaseTimings()  # noqa: RUF009 - frozen
    # Says in the store that the run uses an artifact: stage and fingerprint.
    record: Callable[[str, str], None] = lambda stage, fingerprint: None
    stop: threading.Event = field(default_factory=threading.Event)
    device: DeviceSlot = field(default_factory=threading.Semaphore)  # one GPU stage a time

    @property
    def work(self) -> Path:
        """Work directories of unfinished jobs, by stage and fingerprint."""
        return self.placement.home / "work"

    def wait_for_store(self, stage: str, *, check: Callable[[], None] = lambda: None) -> StoreWait:
        """Return what repeats a stage's requests that the store does not answer."""
        return StoreWait(
            self.store,
            stage,
            report=lambda text: self.watch(stage, {"kind": "waiting", "text": text}),
            stop=self.stop,
            terms=self.terms,
            check=check,
        )

    def open_cache(self) -> Cache:
        """Fetched artifacts. What it hands out is in use until it is closed."""
        return Cache(self.placement.home / "artifacts", default_cache_limit())


@dataclass(frozen=True, kw_only=True)
class Built:
    """A stage's artifact, and whether anything was done for it."""

    manifest: Manifest
    uri: str  # of the manifest in the store
    cached: bool
