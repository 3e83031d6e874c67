"""A small store with every kind of object, and what each name truly stands for in it.

Run tiny-1 made the artifacts of generation 0, run tiny-2 those of generation 1. Each of generation
1 was asked for again, and came out otherwise than before. The tag main stands for
tiny-2, the tag best for tiny-1.
"""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.publish import publish
from flows.artifacts.runs import point
from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from tests.support.flows.rows import PROVENANCE, identity_of, no_fence
from tests.support.flows.shelf import put_run

Contents: TypeAlias = Mapping[str, bytes]  # of an artifact's files, by path

# What each stage of the pipeline leaves, by name.
FILES = {
    "shards": ("shard_00000.parquet", "shard_00001.parquet", "index.json"),
    "task_data": ("gsm8k_train.jsonl", "arithmetic_test.jsonl"),
    "tokenizer": ("tokenizer.tiktoken", "tokenizer.json"),
    "tokens": ("train/00000.u16", "train/00000.lengths", "tokens.json"),
    "rows": ("train.rows", "val.rows", "rows.json"),
    "pretrain": ("model.safetensors", "config.json", "tokenizer/tokenizer.tiktoken"),
    "base_eval": ("scores.json", "samples.jsonl"),
    "sft": ("model.safetensors", "config.json", "tokenizer/tokenizer.json"),
    "report": ("report.html", "report.md"),
}
RUN, OLD_RUN = "tiny-2", "tiny-1"
EARLY = ("shards", "task_data", "tokenizer", "tokens")  # what tiny-2 knew when it had just begun


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, and everything that was ever true in it."""

    directory: Path
    old: dict[str, Manifest]  # generation 0, by stage
    new: dict[str, Manifest]  # generation 1
    contents: dict[str, Contents]  # by digest of the artifact
    earlier: dict[str, bytes]  # object -> what it held before, where it held something else

    @property
    def store(self) -> LocalStore:
        """The store as it is."""
        return LocalStore(self.directory)

    def path(self, key: str) -> Path:
        """Where an object's bytes are."""
        return self.directory / key

    def truth(self, manifest: Manifest) -> Contents:
        """The bytes of an artifact's files."""
        return self.contents[manifest.digest]


def make_world(directory: Path, *, seed: int) -> World:
    """Fill a store."""
    generator = random.Random(seed)
    store = LocalStore(directory / "store")
    contents: dict[str, Contents] = {}

    def make(stage: str, number: int, run: str, redo: int = 0) -> Manifest:
        files = {name: _bytes_of(name, generator) for name in FILES[stage]}
        output = directory / "output" / f"{stage}-{number}-{run}"
        for name, data in files.items():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_bytes(data)
        log = output.with_suffix(".jsonl")
        log.write_bytes(_bytes_of("events.jsonl", generator))
        manifest = publish(
            store,
            identity_of(stage, number=number).redone(redo),
            output,
            logs=[log],
            inputs={},
            provenance=dataclasses.replace(PROVENANCE, run=run),
            check_lease=no_fence,
        ).manifest
        contents[manifest.digest] = files
        return manifest

    old = {stage: make(stage, 0, OLD_RUN) for stage in FILES}
    first = {stage: make(stage, 1, OLD_RUN) for stage in FILES}
    new = {stage: make(stage, 1, RUN, redo=1) for stage in FILES}
    earlier: dict[str, bytes] = {}
    for stage, manifest in new.items():
        earlier[manifest_key(manifest)] = store.get(manifest_key(first[stage]))
        for file, before in zip(manifest.files, first[stage].files, strict=True):
            earlier[file.key] = store.get(before.key)
    put_run(store, OLD_RUN, *old.values(), started="2026-11-20T06:00:00Z")
    put_run(store, RUN, *(new[stage] for stage in EARLY), status="running", ended=None)
    earlier[f"runs/{RUN}.json"] = store.get(f"runs/{RUN}.json")
    put_run(store, RUN, *new.values())
    point(store, "best", OLD_RUN)
    point(store, "main", OLD_RUN)
    earlier["refs/main.json"] = store.get("refs/main.json")
    point(store, "main", RUN)
    return World(
        directory=directory / "store",
        old=old,
        new=new,
        contents=contents,
        earlier=earlier,
    )


def manifest_key(manifest: Manifest) -> str:
    """Where an artifact's manifest is."""
    return f"{manifest.stage}/{manifest.fingerprint}/manifest.json"


def _bytes_of(name: str, generator: random.Random) -> bytes:
    """Some content; text where the name promises text."""
    size = generator.randrange(200, 6000)
    if name.endswith((".json", ".jsonl", ".md", ".html")):
        return bytes(generator.choice(b'{}[]"abc 0123\n') for _ in range(size // 4))
    return generator.randbytes(size)
