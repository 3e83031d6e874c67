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
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


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


def put_measured_runs(store: Store) -> list[Manifest]:
    """Put two runs that share a model; the first has an evaluation, the second failed after SFT."""
    execution = {"started": 100.0, "ended": 160.0, "device": "cpu", "processes": 1, "dollars": 0.5}
    resumed = {"started": 200.0, "ended": 230.0, "device": "cuda", "processes": 8, "dollars": 0.25}
    model = put_measured(
        store,
        "pretrain",
        segments=(execution, resumed),
        metrics={"val_bpb": 1.25, "note": "x", "ok": True},
        steps=[
            {"step": 1, "time": 1.0, "seconds": 0.5, "loss": 3.5},
            {"step": 2, "time": 2.0, "seconds": 1.5, "loss": float("nan")},
        ],
    )
    answers = [{"task": "sums", "place": i, "answer": i + 1, "correct": i == 0} for i in (0, 1)]
    evaluated = put_measured(
        store,
        "base_eval",
        metrics={"core": 0.2, "core_low": 0.1, "core_high": 0.3},
        inputs={"pretrain": model},
        examples=answers,
    )
    tuned = put_measured(store, "sft", steps=[{"step": 1, "time": 1.0, "reward": 0.25}])
    put_run(store, "tiny-1", model, evaluated, started="2026-11-21T06:00:00Z")
    put_run(store, "tiny-2", model, tuned, depth=4, overrides=("a.b=1",), status="failed")
    return [model, evaluated, tuned]


def put_file(store: Store, manifest: Manifest, path: str, data: bytes) -> File:
    """A file of an artifact whose bytes are there."""
    key = f"{manifest.stage}/{manifest.fingerprint}/files/b/{path}"
    store.put(key, data)
    return File(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), key=key)
