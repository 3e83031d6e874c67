"""Transactions of Prefect's server on SQLite wait for each other instead of failing."""

import asyncio
from pathlib import Path

import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncEngine

from deployments.write_locks import lock_at_begin


def test_two_transactions_that_read_before_they_write_both_commit(tmp_path: Path) -> None:
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
        async with engine.connect() as connection:
            return (await connection.execute(sa.text("select n from counts"))).scalar_one()

    assert asyncio.run(both()) == 2
