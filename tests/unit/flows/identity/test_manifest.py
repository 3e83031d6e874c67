"""The record of an artifact: read back as written, refused when any part of it cannot be."""

import dataclasses

import pytest

from flows.identity.manifest import Manifest, digest_of
from nanochat_core.errors import ArtifactError
from tests.support.flows.shelf import make_manifest

MANIFEST = make_manifest(
    "tokenizer",
    config={"tokenizer": {"vocab_size": 512}},
    files={"sub/a.json": "{}", "tokenizer.tiktoken": "123456789"},
    inputs={"shards": make_manifest("shards")},
    metrics={"bytes_per_token": 3.5},
    segments=({"started": 1.0, "ended": 2.5, "device": "cpu"},),
)
FILES, PREIMAGE = MANIFEST.files, MANIFEST.preimage


def read(manifest: Manifest) -> Manifest:
    return Manifest.from_json(manifest.to_json(), where="here")


def test_a_manifest_is_read_as_it_was_written():
    assert read(MANIFEST) == MANIFEST
    assert read(MANIFEST).to_json() == MANIFEST.to_json()


def test_the_digest_is_about_contents_and_not_about_places():
    elsewhere = tuple(dataclasses.replace(file, key="other/key") for file in reversed(FILES))
    assert digest_of(elsewhere) == digest_of(FILES)
    for change in ({"path": "b"}, {"size": 3}, {"sha256": "0" * 64}):
        assert digest_of((dataclasses.replace(FILES[0], **change), FILES[1])) != digest_of(FILES)
    assert digest_of(FILES[:1]) != digest_of(FILES)


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "", "a\\..\\b", "c:evil"])
@pytest.mark.parametrize("field", ["path", "key"])
@pytest.mark.parametrize("group", ["files", "logs"])
def test_a_path_that_would_leave_its_directory_is_refused(group, field, path):
    files = (dataclasses.replace(FILES[0], **{field: path}),)
    manifest = dataclasses.replace(MANIFEST, **{group: files})
    if group == "files":
        manifest = dataclasses.replace(manifest, digest=digest_of(files))
    with pytest.raises(ArtifactError, match="expected a name in the store"):
        read(manifest)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint does not follow"),
        ({"preimage": PREIMAGE | {"format": 2}}, "fingerprint does not follow"),
        ({"stage": "rows"}, "of stage tokenizer"),
        ({"digest": "0" * 64}, "digest does not follow"),
        ({"files": FILES[:1]}, "digest does not follow"),
        ({"files": (), "digest": digest_of(())}, "no files"),
        ({"files": FILES + FILES, "digest": digest_of(FILES + FILES)}, "have one path"),
        ({"inputs": {}}, "inputs are not those"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(changes, why):
    with pytest.raises(ArtifactError, match=why) as caught:
        read(dataclasses.replace(MANIFEST, **changes))
    assert caught.value.hint
