"""The URL of a store: a directory or a bucket, and what is refused."""

from pathlib import Path

import pytest

from infra.storage.open import open_store
from nanochat_core.errors import StoreError

DIRECTORY, BUCKET = "a store is a directory, file:///path/to/store", "3 to 63 lower-case letters"
NO_DIRECTORIES = (
    *("gs://bucket/prefix", "/tmp/store", "", "file://host/x", "file:relative", "file:///a?b"),
    *("s3://[bucket]/x", "file://[/data", "file:///tmp/a%00b"),
)
NO_BUCKETS = ("", "/x", "b/x", "ab/x", "UPPER/x", "-ab/x", f"{64 * 'a'}/x", "buc/x?a=b", "buc/a#b")


def test_a_url_opens_the_directory_it_names(tmp_path: Path) -> None:
    directory = tmp_path / "my store#1"
    store = open_store(directory.as_uri())
    assert store.url == directory.as_uri()
    store.put("a", b"x")
    assert (directory / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "error", "hint"),
    [
        *((url, f"unsupported store URL '{url}'", DIRECTORY) for url in NO_DIRECTORIES),
        *((f"s3://{u}", f"unsupported store URL 's3://{u}'", BUCKET) for u in NO_BUCKETS),
        *(
            (f"s3://bucket/{prefix}", f"'{prefix}' cannot be a key of the store", "letters")
            for prefix in ("a/../b", ".hidden", "a b")
        ),
        ("s3://KEY:geheim@bucket/x", "a store's URL cannot hold credentials", "AWS_SECRET_ACCESS"),
    ],
)
def test_a_url_that_is_no_store_is_refused_with_what_one_looks_like(
    url: str, error: str, hint: str
) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert str(caught.value) == error
    assert hint in (caught.value.hint or "")
    assert "geheim" not in f"{caught.value} {caught.value.hint}"
