"""From a store's URL to a store."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.storage.base import Store
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError


def open_store(url: str) -> Store:
    """The store at `url`: file:///absolute/path or s3://bucket/prefix.

    Raises StoreError for a URL that is none. Nothing is created or contacted: the first verb does.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from infra.storage.s3.store import S3Store  # loads botocore

        return S3Store(url)
    path = Path(unquote(parts.path))
    is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    if not is_local or not path.is_absolute() or parts.query or parts.fragment:
        raise StoreError(
            f"unsupported store URL '{url}'",
            hint="a store is a directory, file:///path/to/store, or a bucket, s3://bucket/prefix",
        )
    return LocalStore(path)
