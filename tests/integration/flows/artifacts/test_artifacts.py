"""Two processes publish at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.publish import find_manifest
from flows.identity.ref import ArtifactRef
from infra.storage.local import LocalStore
from tests.support.flows.rows import (
    GIGABYTE,
    identity_of,
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        yield cache


PUBLISHER = """
import sys
from pathlib import Path
from flows.artifacts.publish import publish
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Provenance
from infra.storage.local import LocalStore

work, me = Path(sys.argv[1]), sys.argv[2]
output = work / me
output.mkdir()
(output / "rows.json").write_text(me)
(output / "train.rows").write_text(me * 50_000)
provenance = Provenance(
    run=me,
    owner="o",
    epoch=1,
    created="2026-11-21T05:53:38Z",
    git_commit=None,
    metrics={},
    segments=(),
)
print("ready", flush=True)
sys.stdin.readline()
for seed in range(20):
    preimage = {"stage": "rows", "format": 1, "config": {"seed": seed}, "inputs": {}, "code": {}}
    identity = Identity(stage="rows", fingerprint=fingerprint_of(preimage), preimage=preimage)
    result = publish(
        LocalStore(work / "store"),
        identity,
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        fence=lambda: None,
    )
    print(result.manifest.provenance.run, result.divergence is not None)
"""


def test_two_processes_that_publish_at_once_agree_on_one_whole_artifact(
    store: LocalStore, tmp_path: Path, cache: Cache
):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0].splitlines() for racer in racers]
    for seed, (a, b) in enumerate(zip(*answers, strict=True)):
        assert a.split()[0] == b.split()[0]
        assert sorted([a.split()[1], b.split()[1]]) == ["False", "True"]
        identity = identity_of("rows", seed=seed)
        manifest = find_manifest(store, ArtifactRef("rows", identity.fingerprint))
        assert manifest is not None
        directory = fetch(store, manifest, cache)
        assert {(directory / "files" / "rows.json").read_text()} == {a.split()[0]}
        assert (directory / "files" / "train.rows").read_text() == a.split()[0] * 50_000
