"""Mutants of the product, and the tests that have to kill them.

test_mutation.py puts one fault after the other into a copy of the tracked files and runs the tests
that guard its subject: a mutant is killed if they fail or take too long, and survives if they pass.

mutants.txt has `== subject`, `@ file`, then for each mutant `# the promise that it breaks`, the old
source (lines with `- `), which occurs once in the file, and the new (`+ `). What the promise says
is what a user would miss: no mutant is equivalent to the original.
"""

import ast
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("mutants.txt")
SIMULATION = (
    "tests/integration/reliability/test_simulation.py::test_every_invariant_holds_in_every_history"
)
# Subject -> the tests that guard it, as pytest is given them. Files that move are corrected here.
GUARDS = {
    "identity": """
        tests/unit/flows/identity/test_records.py
        tests/unit/flows/identity/test_redo.py
        tests/unit/flows/identity/test_manifest.py
        tests/unit/flows/identity/test_fingerprint.py
        tests/integration/flows/identity/test_fingerprint_golden.py
        tests/unit/flows/artifacts/test_record_types.py
        tests/integration/flows/identity/test_fingerprint_repository.py"""
    "::test_a_stage_depends_on_the_tasks_that_its_configuration_names",
    "leases": f"""
        {SIMULATION}
        tests/unit/flows/leases/test_lease.py
        tests/unit/flows/leases/test_process.py
        tests/unit/flows/leases/test_acquire.py
        tests/unit/flows/leases/test_held_lease.py""",
    "publish": f"""
        {SIMULATION}
        tests/unit/flows/artifacts/test_artifacts.py
        tests/unit/flows/artifacts/test_checkpoints.py
        tests/unit/flows/artifacts/test_shared_files.py
        tests/unit/flows/artifacts/test_verify.py""",
    "gc": """
        tests/unit/flows/gc/test_gc.py
        tests/unit/flows/gc/test_sweep.py
        tests/integration/reliability/test_gc_histories.py""",
    "scheduler": """
        tests/integration/nanochat_core/engine/test_scheduler_promises.py
        tests/integration/nanochat_core/engine/test_scheduler.py""",
    "optimizer": """
        tests/integration/nanochat_core/optim/test_updates.py
        tests/integration/nanochat_core/optim/test_optimizer.py
        tests/integration/nanochat_core/optim/test_sharded.py""",
    "packing": """
        tests/unit/nanochat_core/data/test_packing.py
        tests/unit/nanochat_core/data/test_rows.py
        tests/unit/nanochat_core/data/test_chat_rows.py""",
}
OPTIONS = ("-xq", "--hypothesis-seed=0", "-p", "no:cacheprovider")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault, as in mutants.txt."""

    subject: str
    path: str  # from the root of the repository
    promise: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.promise}"

    def mutate(self, source: str) -> str:
        """Return `source` with the fault. Raises ValueError unless `old` is in it once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self}: {count} times in the file, not once: {self.old}")
        mutated = source.replace(self.old, self.new)
        ast.parse(mutated)  # a file that does not parse would fail any test
        return mutated


class NoResult(Exception):
    """The tests fail without a mutant."""


def read_mutants(text: str) -> list[Mutant]:
    """Return the mutants of a text such as that of mutants.txt."""
    fields: dict[str, str] = {}
    found: list[dict[str, str]] = []
    names = {"==": "subject", "@": "path", "#": "promise", "-": "old", "+": "new"}
    for mark, _, rest in (line.partition(" ") for line in text.splitlines()):
        name = names[mark]
        if mark == "#":
            found.append(fields | {name: rest})
        elif mark in "-+":
            found[-1][name] = f"{found[-1][name]}\n{rest}" if name in found[-1] else rest
        else:
            fields[name] = rest
    return [Mutant(**mutant) for mutant in found]


def find_missing(subjects: Iterable[str]) -> list[str]:
    """Return the files of tests in `GUARDS` that do not exist."""
    paths = [name.partition("::")[0] for s in subjects for name in GUARDS[s].split()]
    return [path for path in paths if not (ROOT / path).is_file()]


def find_survivors(root: Path, guards: Sequence[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    """Run the tests with each mutant, one by one, in one copy of `root`. Raises NoResult."""
    began = time.monotonic()
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy = Path(name) / "tree"
        _copy_tracked(root, copy)
        if not _passes(copy, guards, limit=None):
            log = copy.with_name("pytest.log").read_text("utf-8", "replace")
            raise NoResult(f"the tests fail without a mutant:\n{log[-4000:]}")
        limit = 60 + 3 * (time.monotonic() - began)  # of a mutant that hangs
        for count, mutant in enumerate(mutants, 1):
            start, path = time.monotonic(), copy / mutant.path
            source = path.read_text("utf-8")
            _write(path, mutant.mutate(source))
            survives = _passes(copy, guards, limit=limit)
            _write(path, source)
            survivors += [mutant] if survives else []
            how = f"{'SURVIVED' if survives else 'killed'}, {time.monotonic() - start:.0f} s"
            print(f"{count}/{len(mutants)}: {how}: {mutant}", flush=True)
    return survivors


def _copy_tracked(root: Path, copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def _write(path: Path, source: str) -> None:
    path.write_text(source, "utf-8")
    # Its compiled form is found by size and time in seconds, which may be the old ones.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _passes(copy: Path, guards: Sequence[str], *, limit: float | None) -> bool:
    """Run the tests in a copy; return whether they pass within `limit` seconds."""
    # An example that Hypothesis stored for one mutant must not decide another's.
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)
    options = [*OPTIONS, "-m", "not gpu", f"--basetemp={copy}.tmp"]
    command = [sys.executable, "-m", "pytest", *options, *guards]
    # PYTHONPATH comes before the installed project, also in processes that tests start.
    env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with copy.with_name("pytest.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:  # whatever a failing test left, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
