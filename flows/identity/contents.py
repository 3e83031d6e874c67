"""Content digests of files whose bytes depend on the version of the library that wrote them."""

from pathlib import Path

PARQUET = ".parquet"


def content_of(path: Path) -> str | None:
    """Return the digest of the documents in a parquet file of text; None for any other file."""
    if path.suffix != PARQUET:
        return None
    # Imported here: only artifacts with parquet files pay for pyarrow, which takes long to load.
    from nanochat_core.data.shard_files import find_text_digest

    return find_text_digest(path)
