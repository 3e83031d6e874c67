"""Names of artifacts in an S3 store mean what they mean in a directory."""

import pytest

from flows.artifacts.listing import list_newest
from flows.artifacts.names import open_artifact
from flows.artifacts.runs import known_names, point, remove_tag, tag_names
from infra.storage.base import Store
from nanochat_core.errors import ConfigError
from tests.support.flows.shelf import put_artifact, put_run, two_alike


def test_names_mean_the_same_in_s3(s3_store: Store):
    old, new = two_alike("sft")
    for manifest in (old, new):
        put_artifact(s3_store, manifest)
    put_run(s3_store, "tiny-20260101t000000z-0a1b", old)
    put_run(s3_store, "tiny-20260102t000000z-0a1b", new)
    assert point(s3_store, "main", "tiny-20260102t000000z-0a1b") is None
    assert point(s3_store, "main", "tiny-20260101t000000z-0a1b") == "tiny-20260102t000000z-0a1b"
    assert open_artifact(s3_store, "sft@main") == old
    assert open_artifact(s3_store, "sft@tiny") == new
    assert open_artifact(s3_store, old.name) == old
    with pytest.raises(ConfigError, match="is ambiguous"):
        open_artifact(s3_store, old.name[:8])
    assert known_names(s3_store) == ["main", "tiny"]
    listing = list_newest(s3_store, count=3)
    assert {listed.ref.fingerprint: listed.names for listed in listing.artifacts} == {
        old.fingerprint: ("main",),
        new.fingerprint: ("tiny",),
    }
    remove_tag(s3_store, "main")
    assert tag_names(s3_store) == []
