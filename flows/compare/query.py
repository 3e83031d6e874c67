"""SQL over tables in memory, without access to files, the network or DuckDB's settings.

DuckDB first copies the tables into memory; then external access is disabled and the settings are
locked. One statement is accepted, of a kind that reads; at worst it changes the copies.
"""

import contextlib
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import duckdb

from flows.compare.tables import VIEWS, read_tables
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

_READING = ("SELECT", "EXPLAIN")
# In this order: after the last one no setting can be changed.
_LOCKED = (
    "SET python_enable_replacements=false",  # or a query could read Python's variables by name
    "SET temp_directory=''",
    "SET enable_external_access=false",
    "SET lock_configuration=true",
)
_MAX_MESSAGE = 300  # characters of an error
_Answer = TypeVar("_Answer")


def query_store(
    store: Store, query: str, read: Callable[[duckdb.DuckDBPyRelation], _Answer]
) -> tuple[_Answer, list[str]]:
    """Return what `read` makes of the answer to one statement over the views of a store.

    The second value says which records were skipped, and why. Raises ConfigError, in one line, for
    a statement that is wrong or not a query.
    """
    tables, problems = read_tables(store, _views_in(query))
    with _opened(tables) as connection:
        try:
            statements = connection.extract_statements(query)
            if len(statements) != 1:
                raise ConfigError(
                    f"{len(statements)} statements are given, expected one", hint=_HINT
                )
            kind = statements[0].type.name
            if kind not in _READING:
                raise ConfigError(f"only select is allowed, not {kind.lower()}", hint=_HINT)
            return read(connection.sql(statements[0])), problems
        except duckdb.Error as error:
            # Without the statement, which DuckDB repeats with a mark, and without suggestions of
            # DuckDB's own tables, such as pg_settings, which lead nowhere here.
            shown = str(error).partition("\nLINE ")[0].splitlines()
            lines = [s for s in shown if "Did you mean" not in s or any(v in s for v in VIEWS)]
            message = " ".join(" ".join(lines).split())[:_MAX_MESSAGE]
            raise ConfigError(
                f"the query cannot be answered: {message}",
                hint="`nanochat sql` without a query lists the views and their columns",
            ) from error


def _views_in(query: str) -> set[str]:
    """Return the views whose names occur in a query.

    No others are written: steps and examples are a file per artifact.
    """
    return {word.lower() for word in re.findall(r"\w+", query)} & VIEWS.keys()


@contextlib.contextmanager
def _opened(tables: Mapping[str, Any]) -> Generator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
        # Load before locking: afterwards the connection sees nothing of the process.
        for name in VIEWS:
            _load(connection, name, tables.get(name))
        for setting in _LOCKED:
            connection.execute(setting)
        yield connection


_HINT = "nanochat sql 'select run, status from runs order by started'"


def _load(connection: duckdb.DuckDBPyConnection, name: str, table: Any) -> None:
    columns = VIEWS[name].columns
    if table is None:
        declared = ", ".join(f"{column} {kind}" for column, kind in columns.items())
        connection.execute(f"CREATE TABLE {name} ({declared})")
        return
    # With declared types: a column without values has none. A file has columns of its own too.
    kinds = () if VIEWS[name].file else columns.items()
    typed = ", ".join(f"{column}::{kind} AS {column}" for column, kind in kinds) or "*"
    connection.register("rows", table)
    connection.execute(f"CREATE TABLE {name} AS SELECT {typed} FROM rows")
    connection.unregister("rows")
