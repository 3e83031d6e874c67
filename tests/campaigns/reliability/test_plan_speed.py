"""`nanochat plan` answers at once, also in a store with hundreds of old artifacts, also over S3.

What counts is the whole command, from the shell and back, on a machine with nothing else to do. On
one that is busy, times are printed (pytest -s), and those tests are skipped.
"""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY, Code
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.base import Store
from infra.storage.local import LocalStore
from tests.support.flows.house import build

OLD = 500  # artifacts that are not today's
TRIES = 3
BUSY = 1.5  # processes that want a CPU: the tests are one themselves
RUN = open_profile("tiny").run
CASES = {
    "nothing to run": ((), 0),
    "one stage changed": (("--set", "sft.num_epochs=9"), 3),
    "every stage changed": (("--set", "seed=999", "--set", "tokenizer.document_cap=9"), 3),
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A store with every stage of today's tiny, and OLD artifacts of other seeds."""
    directory = tmp_path_factory.mktemp("full")
    store, code = LocalStore(directory / "store"), Code(REPOSITORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # a power cut here would be no loss
        for seed in range(1, OLD // len(STAGES) + 2):
            build(store, directory, code, run=dataclasses.replace(RUN, seed=RUN.seed + seed))
        build(store, directory, code, run=RUN)
    assert sum(1 for _ in store.list("index/")) >= OLD + len(STAGES)
    return store


@pytest.fixture
def full_s3(full: LocalStore, s3_store: Store) -> str:
    """The same on a server: the records, without the files, which no plan reads."""
    keys = [e.key for e in full.list("") if "/files/" not in e.key]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3_store.put(key, full.get(key)), keys))
    return s3_store.url


def check_seconds(*words: str, code: int, at_most: float) -> None:
    """Fail if the best of a few tries takes too long; skip on a machine that was busy before."""
    load, seconds = os.getloadavg()[0], list[float]()
    for _ in range(TRIES):
        began = time.monotonic()
        command = [sys.executable, "-m", "flows.cli.app", *words]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
        seconds.append(time.monotonic() - began)
        assert (done.returncode, done.stderr) == (code, b"")
    print(f"\n{' '.join(words)}: {min(seconds):.2f} s at a load of {load:.1f}")
    if load >= BUSY:
        pytest.skip(f"load average {load:.2f}, at least {BUSY}: {min(seconds):.2f} s say nothing")
    assert min(seconds) < at_most


@pytest.mark.parametrize(("kind", "at_most"), [("full", 0.5), ("full_s3", 2.0)])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_of_a_directory_takes_half_a_second_and_of_a_server_two(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, at_most: float, case: str
) -> None:
    store = request.getfixturevalue(kind)
    url = store if isinstance(store, str) else store.url
    words, code = CASES[case]
    place = ("--gpus", "0", "--home", str(tmp_path / "home"), "--store", url)
    check_seconds("plan", "tiny", "--exit-code", *words, *place, code=code, at_most=at_most)


def test_help_takes_half_a_second() -> None:
    check_seconds("--help", code=0, at_most=0.5)
