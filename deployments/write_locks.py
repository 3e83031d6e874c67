"""Prefect's server on SQLite: a transaction takes the write lock when it begins.

Prefect begins most transactions as readers. If another transaction commits before the first write
of such a one, SQLite refuses that write at once ("database is locked", however long its timeout),
and the client gets a 503: a form in Prefect's pages then says "Unknown error while creating flow
run". A transaction that begins with the lock waits for its turn. What Prefect only reads within it,
as when a work queue is paused, begins without the lock: it would wait for the transaction that
waits for it. A server on Postgres is not touched.

The server loads this module as that of its ordering of events, which is Prefect's own: no other
setting names one.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.events.ordering.memory import CausalOrdering
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

__all__ = ["CausalOrdering", "lock_at_begin"]

_begin_as_prefect = AioSqliteConfiguration.begin_transaction


def lock_at_begin() -> None:
    """Make transactions of this process that Prefect opens on SQLite begin with the write lock."""
    AioSqliteConfiguration.begin_transaction = _begin


@asynccontextmanager
async def _begin(
    self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AsyncGenerator[AsyncSessionTransaction, None]:
    del with_for_update  # in Prefect's own words: with the lock from the start
    async with _begin_as_prefect(self, session, with_for_update=True) as transaction:
        await session.connection()  # begins at once, so that the mode can be that of others now
        SQLITE_BEGIN_MODE.set("DEFERRED")  # Prefect sets it back at the end
        yield transaction


lock_at_begin()
