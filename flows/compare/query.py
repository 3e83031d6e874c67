"""SQL over tables in memory, without access to files, the network or DuckDB's settings.

DuckDB first copies the tables into memory; then external access is disabled and the settings are
locked. One statement is accepted, of a kind that reads; at worst it changes the copies.
"""

import contextlib
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import duckdb

from flows.compare.tables import VIEWS, write_tables
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


def select(query: str, directory: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return columns and rows of one statement over the tables below `directory`.

    Raises ConfigError, in one line, for a statement that is wrong or not a query.
    """
    with _answer(query, directory) as found:
        return found.columns, found.fetchall()


def query_store(store: Store, query: str) -> tuple[Any, list[str]]:
    """Return the answer to one statement over the views of a store, as a pyarrow.Table.

    The second value says which records were skipped, and why. Raises like `select`.
    """
    with tempfile.TemporaryDirectory(prefix="nanochat-sql-") as directory:
        problems = write_tables(store, views_in(query), Path(directory))
        with _answer(query, Path(directory)) as found:
            table = found.to_arrow_table()
    return table, list(dict.fromkeys(problems))


def views_in(query: str) -> set[str]:
    """Return the views whose names occur in a query.

    No others are written: steps and examples are a file per artifact.
    """
    return {word.lower() for word in re.findall(r"\w+", query)} & VIEWS.keys()


@contextlib.contextmanager
def _answer(query: str, directory: Path) -> Generator[duckdb.DuckDBPyRelation]:
    """Yield the rows of one statement. Raises like `select`, also while they are read."""
    with _opened(directory) as connection:
        try:
            statements = connection.extract_statements(query)
            if len(statements) != 1:
                raise ConfigError(
                    f"{len(statements)} statements are given, expected one", hint=_HINT
                )
            kind = statements[0].type.name
            if kind not in _READING:
                raise ConfigError(f"only select is allowed, not {kind.lower()}", hint=_HINT)
            yield connection.sql(statements[0])
        except duckdb.Error as error:
            raise _mistake(error) from error


def columns_of(directory: Path) -> dict[str, list[str]]:
    """Return the columns of each view with their types, of the tables below `directory`."""
    with _opened(directory) as connection:
        rows = connection.execute(
            "SELECT table_name, column_name || ' ' || lower(data_type) FROM duckdb_columns() "
            "WHERE NOT internal ORDER BY table_oid, column_index"
        ).fetchall()
    return {name: [column for table, column in rows if table == name] for name in VIEWS}


@contextlib.contextmanager
def _opened(directory: Path) -> Generator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
        # Load before locking: afterwards the connection cannot read files.
        for name in VIEWS:
            _load(connection, name, directory)
        for setting in _LOCKED:
            connection.execute(setting)
        yield connection


_HINT = "nanochat sql 'select run, status from runs order by started'"


def _load(connection: duckdb.DuckDBPyConnection, name: str, directory: Path) -> None:
    columns = VIEWS[name].columns
    declared = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    lines = directory / f"{name}.jsonl"
    files = sorted(map(str, (directory / name).glob("*.parquet")))
    if lines.exists():
        # With declared types: DuckDB would guess them from the first rows, wrongly for nulls.
        types = ", ".join(f"{column}: '{kind}'" for column, kind in columns.items())
        connection.execute(
            f"CREATE TABLE {name} AS FROM read_json(?, format='newline_delimited', "
            f"columns={{{types}}}, timestampformat='%Y-%m-%dT%H:%M:%SZ')",
            [str(lines)],
        )
    elif files:
        # union_by_name, since each stage has columns of its own. The key is in the file's name.
        connection.execute(
            f"CREATE TABLE {name} AS SELECT split_part(parse_filename(filename), '-', 1) AS stage, "
            "split_part(parse_filename(filename, true), '-', 2) AS fingerprint, "
            "* EXCLUDE (filename) FROM read_parquet(?, union_by_name=true, filename=true)",
            [files],
        )
    else:
        connection.execute(f"CREATE TABLE {name} ({declared})")


def _mistake(error: duckdb.Error) -> ConfigError:
    """Return DuckDB's error as a ConfigError in one line, with its suggestion for a wrong name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # DuckDB also suggests tables of its own, such as pg_settings, which lead nowhere here.
    suggestions = [
        line
        for line in lines[1:]
        if line.startswith("Candidate")
        or (line.startswith("Did you mean") and any(name in line for name in VIEWS))
    ]
    first = re.sub(r"^(\w+ )+Error: ", "", lines[0])
    message = " ".join([first[:1].lower() + first[1:], *suggestions[:1]])[:_MAX_MESSAGE]
    return ConfigError(
        f"the query cannot be answered: {message}",
        hint="`nanochat sql` without a query lists the views and their columns",
    )
