"""Transactions of Prefect's server on SQLite wait for each other instead of failing."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine


def test_two_transactions_that_read_before_they_write_both_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prefect's server takes seconds to import, which only the worker of this test should spend.
    from prefect.server.database.configurations import AioSqliteConfiguration

    from deployments.write_locks import lock_at_begin

    # Sets it again at the end, after what lock_at_begin sets.
    begin = AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", begin)
    lock_at_begin()
    database = AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{tmp_path}/db")

    async def add_one(engine: AsyncEngine) -> None:
        session = await database.session(engine)
        async with session, database.begin_transaction(session):
            (count,) = (await session.execute(sa.text("select n from counts"))).one()
            await asyncio.sleep(0.05)  # the other one begins meanwhile
            await session.execute(sa.text(f"update counts set n = {count + 1}"))

    async def both() -> int:
        engine = await database.engine()
        async with engine.begin() as connection:
            await connection.execute(sa.text("create table counts (n integer)"))
            await connection.execute(sa.text("insert into counts values (0)"))
        await asyncio.gather(add_one(engine), add_one(engine))
        try:
            async with engine.connect() as connection:
                return (await connection.execute(sa.text("select n from counts"))).scalar_one()
        finally:
            await engine.dispose()

    assert asyncio.run(both()) == 2
