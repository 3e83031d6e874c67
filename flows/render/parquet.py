"""DuckDB for tables in files."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


def open_duckdb() -> "duckdb.DuckDBPyConnection":
    """Return a connection of the caller's own to this process's database, which is empty.

    Only to read files: what is created or set globally would be there for all callers.
    """
    return _database().cursor()


@functools.cache
def _database() -> "duckdb.DuckDBPyConnection":
    """Return the one database: to open it takes thirty times as long as to read a table."""
    import duckdb  # here, since importing it slows down commands that do not need it

    # Without a cache of files, which knows a changed one only by its time and size.
    return duckdb.connect(":memory:", config={"enable_external_file_cache": False})
