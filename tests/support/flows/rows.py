"""One small artifact to publish and to fetch: a job's output of three files, and its events."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flows.artifacts.publish import Published, publish
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest, Provenance
from infra.storage.base import OnBytes, Retry, Store, call_once, ignore_bytes

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
    """A job's directory with three files and its events; returns output/."""
    output = tmp_path / "work" / "output"
    (output / "sub").mkdir(parents=True, exist_ok=True)
    (output / "train.rows").write_bytes(train)
    (output / "rows.json").write_text("{}")
    (output / "sub" / "empty.bin").write_bytes(b"")
    (output.parent / "events.jsonl").write_text('{"kind": "start"}\n')
    return output


def publish_files(
    store: Store, stage: str, files: Mapping[str, bytes], directory: Path, *, run: str = "tiny-1"
) -> Manifest:
    """Publish an artifact of `stage` with these files; it stands on nothing."""
    contents = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    identity = identity_of(stage, contents=contents)
    output = directory / identity.fingerprint / run
    for name, data in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    log = output.with_suffix(".jsonl")
    log.write_text("{}\n")
    return publish(
        store,
        identity,
        output,
        logs=[log],
        inputs={},
        provenance=replace(PROVENANCE, run=run),
        check_lease=no_fence,
    ).manifest


def publish_directory(store: Store, stage: str, directory: Path) -> Manifest:
    """Publish an artifact of `stage` with the files of a directory; it stands on nothing."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return publish_files(store, stage, files, directory.parent / "published")


def no_fence() -> None:
    """Check nothing: no other process publishes."""


def publish_rows(
    store: Store,
    tmp_path: Path,
    *,
    train: bytes = b"123456",
    identity: Identity = ROWS,
    check_lease: Callable[[], None] = no_fence,
    retry: Retry = call_once,
    on_bytes: OnBytes = ignore_bytes,
) -> Published:
    output = write_output(tmp_path, train=train)
    return publish(
        store,
        identity,
        output,
        logs=[output.parent / "events.jsonl"],
        inputs={},
        provenance=PROVENANCE,
        check_lease=check_lease,
        retry=retry,
        on_bytes=on_bytes,
    )
