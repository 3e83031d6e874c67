"""SQL over tables in memory, and over nothing else: no file, no network, no setting is in reach.

DuckDB copies the tables, then everything that reaches outside is turned off and its settings are
locked. One statement that reads is accepted; whatever it did, it would do to copies.
"""

import contextlib
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from flows.compare.tables import VIEWS
from nanochat_core.errors import ConfigError

_READING = ("SELECT", "EXPLAIN")
_LOCKED = (
    "SET python_enable_replacements=false",  # names of Python's variables
    "SET temp_directory=''",
    "SET enable_external_access=false",
    "SET lock_configuration=true",
)
_MAX_MESSAGE = 300  # characters of an error


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a statement gave."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


def select(query: str, directory: Path) -> Result:
    """The result of one statement over what `write_tables` wrote below `directory`.

    Raises ConfigError, in one line, for a statement that is wrong or does not read.
    """
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
            cursor = connection.execute(statements[0])
            columns = tuple(str(column[0]) for column in cursor.description or ())
            return Result(columns=columns, rows=cursor.fetchall())
        except duckdb.Error as error:
            raise _mistake(error) from error


def columns_of(directory: Path) -> dict[str, list[str]]:
    """The columns of each view, with their types, over what was written below `directory`."""
    with _opened(directory) as connection:
        rows = connection.execute(
            "SELECT table_name, column_name || ' ' || lower(data_type) FROM duckdb_columns() "
            "WHERE NOT internal ORDER BY table_oid, column_index"
        ).fetchall()
    return {name: [column for table, column in rows if table == name] for name in VIEWS}


@contextlib.contextmanager
def _opened(directory: Path) -> Generator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:") as connection:
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
        types = ", ".join(f"{column}: '{kind}'" for column, kind in columns.items())
        connection.execute(
            f"CREATE TABLE {name} AS FROM read_json(?, format='newline_delimited', "
            f"columns={{{types}}}, timestampformat='%Y-%m-%dT%H:%M:%SZ')",
            [str(lines)],
        )
    elif files:
        connection.execute(
            f"CREATE TABLE {name} AS SELECT split_part(parse_filename(filename), '-', 1) AS stage, "
            "split_part(parse_filename(filename, true), '-', 2) AS fingerprint, "
            "* EXCLUDE (filename) FROM read_parquet(?, union_by_name=true, filename=true)",
            [files],
        )
    else:
        connection.execute(f"CREATE TABLE {name} ({declared})")


def _mistake(error: duckdb.Error) -> ConfigError:
    """DuckDB's error in one line, with what it takes a wrong name for."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines[1:] if line.startswith(("Candidate", "Did you mean"))]
    first = re.sub(r"^(\w+ )+Error: ", "", lines[0])
    message = " ".join([first[:1].lower() + first[1:], *said[:1]])[:_MAX_MESSAGE]
    return ConfigError(
        f"the query cannot be answered: {message}",
        hint="`nanochat sql` without a query lists the views and their columns",
    )
