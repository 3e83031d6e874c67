"""One small artifact to publish and to fetch: a job's output of three files, and its events."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.artifacts.publish import Published, publish
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest, Provenance
from infra.storage.base import Store

GIGABYTE = 10**9
PROVENANCE = Provenance(
    run="tiny-1",
    owner="o",
    epoch=1,
    created="2026-11-21T05:53:38Z",
    git_commit=None,
    metrics={"n": 1},
    segments=(),
)


def identity_of(stage: str, **config: object) -> Identity:
    preimage = {"stage": stage, "format": 1, "config": config, "inputs": {}, "code": {}}
    return Identity(stage=stage, fingerprint=fingerprint_of(preimage), preimage=preimage)  # type: ignore[arg-type]


ROWS = identity_of("rows", seed=1)


def write_output(tmp_path: Path, *, train: bytes = b"123456") -> Path:
    """Write a job's directory with three files and its events; return output/."""
    output = tmp_path / "work" / "output"
    (output / "sub").mkdir(parents=True, exist_ok=True)
    (output / "train.rows").write_bytes(train)
    (output / "rows.json").write_text("{}")
    (output / "sub" / "empty.bin").write_bytes(b"")
    (output.parent / "events.jsonl").write_text('{"kind": "start"}\n')
    return output


def publish_output(
    store: Store, output: Path, *, identity: Identity = ROWS, **options: Any
) -> Published:
    """Publish a directory as an artifact without inputs; `options` are those of `publish`."""
    facts = {"logs": [], "provenance": PROVENANCE, **options}
    return publish(store, identity, output, inputs={}, **facts)


def publish_files(
    store: Store, stage: str, files: Mapping[str, bytes], directory: Path, *, run: str = "tiny-1"
) -> Manifest:
    """Publish an artifact of `stage` with these files; it has no inputs."""
    contents = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    identity = identity_of(stage, contents=contents)
    output = directory / identity.fingerprint / run
    for name, data in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    log = output.with_suffix(".jsonl")
    log.write_text("{}\n")
    provenance = replace(PROVENANCE, run=run)
    return publish_output(
        store, output, identity=identity, logs=[log], provenance=provenance
    ).manifest


def publish_directory(store: Store, stage: str, directory: Path) -> Manifest:
    """Publish an artifact of `stage` with the files of a directory; it has no inputs."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return publish_files(store, stage, files, directory.parent / "published")


def publish_rows(
    store: Store, tmp_path: Path, *, train: bytes = b"123456", **options: Any
) -> Published:
    """Publish a job's output of three files, and its events."""
    output = write_output(tmp_path, train=train)
    return publish_output(store, output, logs=[output.parent / "events.jsonl"], **options)
