"""Open an artifact store by its URL."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.storage.base import Store
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError


def open_store(url: str) -> Store:
    """Return the store at `url`: file:///absolute/path or s3://bucket/prefix.

    Raises StoreError if the URL is not one of a store. Nothing is created or contacted before the
    first verb.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets where an IPv6 address would stand
        raise _unsupported(url) from error
    if parts.scheme == "s3":
        from infra.storage.s3.store import S3Store  # loads botocore

        return S3Store(url)
    # Path.as_uri, which makes our default URL, percent-encodes spaces and non-ASCII letters.
    path = Path(unquote(parts.path))
    is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    is_path = path.is_absolute() and "\0" not in str(path)
    if not is_local or not is_path or parts.query or parts.fragment:
        raise _unsupported(url)
    return LocalStore(path)


def _unsupported(url: str) -> StoreError:
    return StoreError(
        f"unsupported store URL '{url}'",
        hint="a store is a directory, file:///path/to/store, or a bucket, s3://bucket/prefix",
    )
