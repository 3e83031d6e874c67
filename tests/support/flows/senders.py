"""Pushing from a store to another."""

import tempfile
from pathlib import Path

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import watch_nothing
from flows.identity.manifest import Manifest
from flows.interop.push import Pushed, choose, push
from infra.storage.base import Store
from infra.storage.local import LocalStore
from tests.support.flows.rows import GIGABYTE, publish_files
from tests.support.flows.shelf import put_run

TOKENIZER = {"a.json": b"[1]", "b/c.bin": b"123456"}
MODEL = {"config.json": b"{}", "model.bin": b"\0" * 5000}


def send(source: Store, target: Store, *references: str) -> Pushed:
    def pause(seconds: float) -> None:
        raise AssertionError("no garbage is collected")

    chosen = choose(source, references)
    with tempfile.TemporaryDirectory() as scratch:
        return push(
            source,
            target,
            chosen,
            scratch=Path(scratch),
            watch=watch_nothing,
            log=lambda text: None,
            pause=pause,
        )


def check_same(source: Store, target: Store, manifest: Manifest, cache: Path) -> None:
    """The artifact is there with the very same manifest, and all its bytes are right."""
    key = f"{manifest.stage}/{manifest.fingerprint}/manifest.json"
    assert target.get(key) == source.get(key)
    with Cache(cache, GIGABYTE) as local:
        fetch(target, manifest, local)
    here, there = (
        [e.key for e in store.list(f"index/{manifest.stage}/") if manifest.fingerprint in e.key]
        for store in (source, target)
    )
    assert here == there != []


def make_run(source: LocalStore, directory: Path) -> tuple[Manifest, Manifest]:
    """What the finished run tiny-1 made."""
    tokenizer = publish_files(source, "tokenizer", TOKENIZER, directory)
    model = publish_files(source, "sft", MODEL, directory)
    put_run(source, "tiny-1", tokenizer, model)
    return tokenizer, model
