"""`nanochat accept --prove` on a real stage, in a checkout of its own."""

import os
import subprocess
import sys
from pathlib import Path

from flows.artifacts.publish import find_manifest
from flows.identity.fingerprint import Code
from flows.identity.ref import ArtifactRef, short
from flows.profiles import open_profile
from infra.storage.local import LocalStore
from tests.support.flows.house import build
from tests.support.flows.repository import commit_all, copy_packages

TINY = open_profile("tiny").run


class Checkout:
    """A copy of this repository's code with git, and a home: commands run as processes."""

    def __init__(self, directory: Path) -> None:
        self.root = copy_packages(directory / "repository")
        self.home = directory / "home"
        self.home.mkdir()

    def run(self, *words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "flows.cli.app",
                *words,
                "--home",
                str(self.home),
                "--gpus",
                "0",
            ],
            env=os.environ | {"PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def edit(self, module: str, old: str, new: str) -> None:
        path = self.root / f"{module.replace('.', '/')}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))


def test_a_refactor_of_a_real_stage_is_proven(tmp_path):
    checkout = Checkout(tmp_path)
    commit = commit_all(checkout.root)
    store = LocalStore(checkout.home / "store")
    made = build(
        store,
        checkout.home / "work",
        Code(checkout.root),
        run=TINY,
        until="task_data",
        commit=commit,
    )
    words = ["accept", "tiny", "task_data", "--why", "clearer", "--prove"]
    checkout.edit("tasks.generated.arithmetic", "Problem", "Exercise")
    head = commit_all(checkout.root)
    code, said, wrong = checkout.run(*words)
    assert (code, wrong) == (0, "")
    changed, *lines = said.splitlines()
    assert changed == f"{made['task_data'].name}: code tasks.generated.arithmetic changed"
    assert "old code: to the end" in said
    assert "new code: to the end" in said
    assert f"to the bit with the commits {short(commit)} and {short(head)} on cpu" in said
    accepted = next(line for line in lines if line.startswith("accepted as "))
    prefix = accepted.split()[2].removeprefix("task_data/").rstrip(";")
    (key,) = [e.key for e in store.list(f"task_data/{prefix}") if e.key.endswith("/manifest.json")]
    new = find_manifest(store, ArtifactRef("task_data", key.split("/")[1]))
    assert new.accepted["from"] == made["task_data"].fingerprint
    proof = new.accepted["proof"]
    assert (proof["old_commit"], proof["new_commit"]) == (commit, head)
