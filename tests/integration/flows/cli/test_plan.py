"""`nanochat accept --prove` on a real stage, in a checkout of its own."""

import os
import subprocess
import sys

from flows.artifacts.publish import find_manifest
from flows.identity.fingerprint import Code
from flows.identity.ref import ArtifactRef, short
from flows.profiles import open_profile
from infra.storage.local import LocalStore
from tests.support.flows.house import build
from tests.support.flows.repository import commit_all, copy_packages

TINY = open_profile("tiny").run


def test_a_refactor_of_a_real_stage_is_proven(tmp_path):
    root, home = copy_packages(tmp_path / "repository"), tmp_path / "home"
    home.mkdir()
    commit = commit_all(root)
    store = LocalStore(home / "store")
    options = {"run": TINY, "until": "task_data", "commit": commit}
    made = build(store, home / "work", Code(root), **options)
    path = root / "tasks/generated/arithmetic.py"
    source = path.read_text()
    assert "Problem" in source
    path.write_text(source.replace("Problem", "Exercise"))
    head = commit_all(root)
    words = ["accept", "tiny", "task_data", "--why", "clearer", "--prove", "--gpus", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.app", *words, "--home", str(home)],
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
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
