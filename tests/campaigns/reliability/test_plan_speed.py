"""`nanochat plan` answers at once, also in a store with hundreds of old artifacts, also over S3.

What counts is the whole command, from the shell and back, on a machine with nothing else to do. On
one that is busy, times are printed (pytest -s), and those tests are skipped.
"""

import compileall
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.identity.fingerprint import PACKAGES, REPOSITORY, Code
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.base import Store
from infra.storage.local import LocalStore
from tests.support.flows.house import build

OLD = 500  # artifacts that are not today's
TRIES = 3
SECONDS_LOCAL = 0.5
SECONDS_S3 = 2.0
BUSY = 1.5  # processes that want a CPU: the tests are one themselves
RUN = open_profile("tiny").run
CASES = {
    "nothing to run": ((), 0),
    "one stage changed": (("--set", "sft.num_epochs=9"), 3),
    "every stage changed": (("--set", "seed=999", "--set", "tokenizer.document_cap=9"), 3),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of our packages: an edit meanwhile would leave something to run."""
    root = tmp_path_factory.mktemp("repository")
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignore)
    compileall.compile_dir(root, quiet=1)  # as an installed package is
    return root


@pytest.fixture(scope="module")
def full(root: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A store with every stage of today's tiny, and OLD artifacts of other seeds."""
    directory = tmp_path_factory.mktemp("full")
    store, code = LocalStore(directory / "store"), Code(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # a power cut here would be no loss
        for seed in range(1, OLD // len(STAGES) + 2):
            build(store, directory, code, run=dataclasses.replace(RUN, seed=RUN.seed + seed))
        build(store, directory, code, run=RUN)
    assert sum(1 for _ in store.list("index/")) >= OLD + len(STAGES)
    return store


def measure(root: Path, store: str, home: Path, words: tuple[str, ...]) -> tuple[int, float, float]:
    """Exit code, and the best wall and CPU seconds of a few plans."""
    place = ("--gpus", "0", "--home", str(home), "--store", store)
    return measure_command(root, "plan", "tiny", "--exit-code", *words, *place)


def measure_command(root: Path, *words: str) -> tuple[int, float, float]:
    """Exit code, and the best wall and CPU seconds of a few tries."""
    command = [sys.executable, "-m", "flows.cli.app", *words]
    wall = cpu = float("inf")
    code = -1
    for _ in range(TRIES):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, cwd=root, capture_output=True, check=False)
        wall = min(wall, time.monotonic() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = min(cpu, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stderr == b""
        code = done.returncode
    return code, wall, cpu


@pytest.mark.parametrize("case", CASES)
def test_a_plan_of_a_directory_takes_half_a_second(
    root: Path, full: LocalStore, tmp_path: Path, case: str
):
    words, expected = CASES[case]
    load = os.getloadavg()[0]
    code, wall, cpu = measure(root, full.url, tmp_path / "home", words)
    print(f"\nfile://, {OLD} old artifacts, {case}: {wall:.2f} s wall, {cpu:.2f} s CPU")
    assert code == expected
    judge(wall, load, at_most=SECONDS_LOCAL)


def test_help_takes_half_a_second(root: Path):
    load = os.getloadavg()[0]
    code, wall, cpu = measure_command(root, "--help")
    print(f"\nhelp: {wall:.2f} s wall, {cpu:.2f} s CPU")
    assert code == 0
    judge(wall, load, at_most=SECONDS_LOCAL)


@pytest.fixture
def full_s3(full: LocalStore, s3_store: Store) -> str:
    """The same on a server: the records, without the files, which no plan reads."""
    keys = [e.key for e in full.list("") if "/files/" not in e.key]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3_store.put(key, full.get(key)), keys))
    return s3_store.url


def test_a_plan_of_an_s3_server_takes_two_seconds(root: Path, full_s3: str, tmp_path: Path):
    load, slowest = os.getloadavg()[0], 0.0
    for case, (words, expected) in CASES.items():
        code, wall, cpu = measure(root, full_s3, tmp_path / "home", words)
        print(f"\ns3://, {OLD} old artifacts, {case}: {wall:.2f} s wall, {cpu:.2f} s CPU")
        assert code == expected
        slowest = max(slowest, wall)
    judge(slowest, load, at_most=SECONDS_S3)


def judge(wall: float, load: float, *, at_most: float) -> None:
    """Fail when it took too long; on a machine that was busy before it began, skip the test."""
    if load >= BUSY:
        pytest.skip(f"load average {load:.2f}, at least {BUSY}: {wall:.2f} s say nothing")
    assert wall < at_most


def test_what_takes_too_long_fails_on_an_idle_machine_and_is_skipped_on_a_busy_one():
    judge(0.4, 1.49, at_most=0.5)
    with pytest.raises(AssertionError):
        judge(0.6, 1.49, at_most=0.5)
    with pytest.raises(pytest.skip.Exception, match=r"load average 1\.50"):
        judge(0.6, 1.5, at_most=0.5)
