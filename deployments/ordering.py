"""The order in which Prefect's automations take events, across restarts of its server.

An event that follows another is held until that one was taken. Which ones were, Prefect's server
keeps in memory: after a restart it waits a quarter of an hour for each event that the server before
it took, and meanwhile no crashed run is resumed and no silent one found. Here nothing from before
the server's start is waited for. The server is told so by its setting
PREFECT_SERVER_EVENTS_CAUSAL_ORDERING, which names this module.
"""

from functools import cache
from uuid import UUID

import psutil
from prefect.server.events.ordering import memory
from prefect.server.events.schemas.events import Event


class CausalOrdering(memory.CausalOrdering):
    """Prefect's own, in memory, which takes what is older than its process as seen."""

    async def event_has_been_seen(self, event: UUID | Event) -> bool:
        """Whether the event was taken, by this server or by one before it."""
        made = _made(event if isinstance(event, UUID) else event.id)
        if made is not None and made < _started():
            return True
        return await super().event_has_been_seen(event)


def _made(event: UUID) -> float | None:
    """When the event was made, in unix seconds, as its id says; None when that says nothing."""
    return (event.int >> 80) / 1000 if event.version == 7 else None


@cache
def _started() -> float:
    """When this process was started, in unix seconds."""
    return psutil.Process().create_time()
