"""Transactions of Prefect's server on SQLite wait for each other instead of failing."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

READ = sa.text("select n from counts")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Prefect's server takes seconds to import, which only the worker of this test should spend.
    from prefect.server.database.configurations import AioSqliteConfiguration

    from deployments.write_locks import lock_at_begin

    # Sets it again at the end, after what lock_at_begin sets.
    begin = AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", begin)
    lock_at_begin()
    return AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{tmp_path}/db")


def count_after(database: Any, work: Callable[[AsyncEngine], Awaitable[Any]]) -> int:
    """Return the count of a table that begins with 0, once `work` is done with it."""

    async def run() -> int:
        engine = await database.engine()
        async with engine.begin() as connection:
            await connection.execute(sa.text("create table counts (n integer)"))
            await connection.execute(sa.text("insert into counts values (0)"))
        try:
            await work(engine)
            async with engine.connect() as connection:
                return (await connection.execute(READ)).scalar_one()
        finally:
            await engine.dispose()

    return asyncio.run(run())


def test_two_transactions_that_read_before_they_write_both_commit(database):
    async def add_one(engine: AsyncEngine) -> None:
        session = await database.session(engine)
        async with session, database.begin_transaction(session):
            (count,) = (await session.execute(READ)).one()
            await asyncio.sleep(0.05)  # the other one begins meanwhile
            await session.execute(sa.text(f"update counts set n = {count + 1}"))

    async def both(engine: AsyncEngine) -> None:
        await asyncio.gather(add_one(engine), add_one(engine))

    assert count_after(database, both) == 2


def test_what_is_read_within_a_transaction_does_not_wait_for_its_end(database):
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE

    async def nested(engine: AsyncEngine) -> None:
        session, other = await database.session(engine), await database.session(engine)
        async with session, database.begin_transaction(session):
            await session.execute(sa.text("update counts set n = 1"))
            async with other:
                assert (await other.execute(READ)).scalar_one() == 0
        assert SQLITE_BEGIN_MODE.get() is None  # as before

    assert count_after(database, nested) == 1


def test_a_work_queue_can_be_paused_on_its_page(api):
    queue = f"/work_queues/{api.post('/work_queues/', {'name': 'to be paused'})['id']}"
    api.patch(queue, {"is_paused": True})  # asked for again each minute, if the server waits
    assert api.get(queue)["status"] == "PAUSED"
    api.delete(queue)
