"""Artifacts with numbers, steps and examples, as training and evaluation leave them."""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.identity.manifest import File, Manifest, digest_of
from infra.storage.base import Store
from tests.support.flows.shelf import make_manifest, put_artifact


def parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as the bytes of a parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def reader(directory: Path) -> tuple[str, Callable[[str], bytes | None]]:
    """Return the name of a directory and a function that reads its files; None for none."""
    return (
        directory.name,
        lambda name: path.read_bytes() if (path := directory / name).exists() else None,
    )


def put_measured(
    store: Store,
    stage: str,
    *,
    steps: Sequence[Mapping[str, Any]] = (),
    examples: Sequence[Mapping[str, Any]] = (),
    losses: Sequence[Mapping[str, Any]] = (),
    scores: object = None,
    **facts: Any,
) -> Manifest:
    """An artifact in the store whose steps, examples and scores.json can be read."""
    manifest = make_manifest(stage, **facts)
    files, logs = list(manifest.files), list(manifest.logs)
    for rows, name, among in (
        (steps, "metrics", logs),
        (examples, "examples", files),
        (losses, "losses", files),
    ):
        if rows:
            among.append(put_file(store, manifest, f"{name}.parquet", parquet(rows)))
    if scores is not None:
        files.append(put_file(store, manifest, "scores.json", json.dumps(scores).encode()))
    files.sort(key=lambda file: file.path)
    made = dataclasses.replace(
        manifest, files=tuple(files), logs=tuple(logs), digest=digest_of(files)
    )
    return put_artifact(store, made)


def put_file(store: Store, manifest: Manifest, path: str, data: bytes) -> File:
    """A file of an artifact whose bytes are there."""
    key = f"{manifest.stage}/{manifest.fingerprint}/files/b/{path}"
    store.put(key, data)
    return File(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), key=key)
