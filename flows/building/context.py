"""The context that all stages of one run share: configuration, store, placement, callbacks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from flows.artifacts.cache import Cache
from flows.identity.fingerprint import REPOSITORY
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait, WaitLog
from infra.launch.torchrun import StageInterrupted
from infra.placement import Placement, default_cache_limit
from infra.storage.base import Store
from nanochat_core.config import RunConfig

# Called with a stage's name and an event, from the thread that builds the stage. Kinds of event
# besides those of runtime.progress:
#
#     cached    {"uri"}                    the artifact exists; nothing was done
#     waiting   {"text"}                   for another process; repeated every `terms.report` s
#     fetching  {"inputs"}                 names of stages
#     building  {"fingerprint", "processes", "directory"}   the job starts, in its directory
#     warning   {"text"}
#     finished  {"uri", "seconds", "metrics"}
#     failed    {"error", "hint", "log_tail"}   hint: None when there is none
#     interrupted {}
Watch: TypeAlias = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Configuration, store, placement and callbacks, shared by all stages of one run."""

    run: RunConfig
    run_id: str  # recorded in the manifests of what it builds
    placement: Placement
    store: Store
    watch: Watch
    strict: bool  # code that the fingerprint does not cover is an error, not a warning
    root: Path = REPOSITORY  # the directory that holds our packages
    terms: LeaseTimings = LeaseTimings()  # noqa: RUF009 - frozen
    # Writes into the run's record that it uses an artifact, which keeps the artifact from
    # garbage collection.
    record: Callable[[ArtifactRef], None] = lambda ref: None
    stop: threading.Event = field(default_factory=threading.Event)
    device: threading.Semaphore = field(default_factory=threading.Semaphore)  # one GPU stage a time

    @property
    def work(self) -> Path:
        """Return the directory of unfinished jobs: work/STAGE/FINGERPRINT each."""
        return self.placement.home / "work"

    def log(self, stage: str, kind: str = "message") -> Callable[[str], None]:
        """Return a function that sends a line as an event: a message, or `waiting` or `warning`."""
        return lambda text: self.watch(stage, {"kind": kind, "text": text})

    def wait_for_store(self, stage: str, *, check: Callable[[], None] | None = None) -> StoreWait:
        """Return a callable that retries requests while the store is unavailable.

        `check` is called between two tries, and may raise.
        """
        return StoreWait(
            store=self.store,
            name=stage,
            waiting=WaitLog(self.log(stage, "waiting"), every=self.terms.report),
            stop=self.stop,
            terms=self.terms,
            check=check or (lambda: None),
        )

    def pause(self, stage: str, seconds: float) -> None:
        """Wait for so many seconds. Raises StageInterrupted, at once, if the run is stopped."""
        if self.stop.wait(seconds):
            raise StageInterrupted(f"{stage}: the run is being stopped")

    def open_cache(self) -> Cache:
        """Open the cache of fetched artifacts; what it returns is not evicted until it closes."""
        return Cache(self.placement.home / "artifacts", default_cache_limit())


@dataclass(frozen=True, kw_only=True)
class Built:
    """A stage's artifact, and whether it was found rather than built."""

    manifest: Manifest
    uri: str  # of the manifest in the store
    cached: bool
