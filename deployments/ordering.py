"""Causal ordering of events for Prefect's automations, across restarts of the Prefect server.

Prefect's server holds an event that follows another until that one has been processed, and records
in memory which have been. So after a restart it would wait 15 minutes for each event that the
server before it processed; meanwhile no crashed run is resumed, and no silent one is detected. This
module never waits for events from before the server's start. The server's setting
PREFECT_SERVER_EVENTS_CAUSAL_ORDERING names it, so it is also where the server gets
`deployments.write_locks`.
"""

from functools import cache
from uuid import UUID

import psutil
from prefect.server.events.ordering import memory
from prefect.server.events.schemas.events import Event

from deployments.write_locks import lock_at_begin

lock_at_begin()


class CausalOrdering(memory.CausalOrdering):
    """Prefect's in-memory ordering, with every event older than the process taken as seen."""

    async def event_has_been_seen(self, event: UUID | Event) -> bool:
        """Return whether the event was processed, by this server or by one before it."""
        made = _made(event if isinstance(event, UUID) else event.id)
        if made is not None and made < _started():
            return True
        return await super().event_has_been_seen(event)


def _made(event: UUID) -> float | None:
    """Return when the event was made, in unix seconds; None if its id has no time."""
    # The first 48 bits of a UUID version 7 are milliseconds since 1970 (RFC 9562).
    return (event.int >> 80) / 1000 if event.version == 7 else None


# Cached, since it is compared with every event, and reading it costs a look at /proc.
@cache
def _started() -> float:
    """Return when this process was started, in unix seconds."""
    return psutil.Process().create_time()
