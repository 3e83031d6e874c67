"""A job's process that a fork server makes is what a started one is (tests/support)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.infra.launch import fork_server

pytestmark = pytest.mark.torch

WORKER = """
import json, os, signal, sys
loaded = sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names)
import numpy, pyarrow.parquet
seen = "pyarrow" in sys.modules and "torch" not in sys.modules
import torch
ours = ("flows", "infra", "nanochat_core", "tasks", "tests")
numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
print(json.dumps({
    "code": sorted(name for name in sys.modules if name.partition(".")[0] in ours),
    "pid": os.getpid(), "parent": os.getppid(), "own session": os.getsid(0) == os.getpid(),
    "words": [sys.argv, sys.orig_argv, open("/proc/self/cmdline").read().rstrip(chr(0))],
    "python": [sys.path, str(sys.flags), sys.dont_write_bytecode, hash("a")],
    "main": [sorted(vars(sys.modules["__main__"])), __spec__.name, __file__],
    "signals": [str(signal.getsignal(number)) for number in sorted(numbers)],
    "files": os.listdir("/dev/fd"), "directory": os.getcwd(), "environment": dict(os.environ),
    "loaded": [loaded, seen], "seeds": [torch.initial_seed(), numpy.random.random()],
    "torch": torch.__config__.parallel_info(),
}))
print("said", file=sys.stderr)
"""


def test_it_differs_from_a_started_process_in_its_numbers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    (code / "nanochat_core").mkdir(parents=True)
    (code / "nanochat_core" / "__init__.py").touch()
    (code / "nanochat_core" / "worker.py").write_text(WORKER)
    (code / "sitecustomize.py").touch()  # which an interpreter imports when it starts
    job = tmp_path / "job.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "NANOCHAT_LAUNCHER": str(os.getpid()),
    }

    def describe(
        entry: str = "nanochat_core.train.pretrain", **options: Any
    ) -> tuple[list[float], dict[str, Any], str]:
        job.write_text(json.dumps({"entry": entry}))
        process = subprocess.Popen(
            [sys.executable, "-m", "nanochat_core.worker", str(job)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        said, error = process.communicate(timeout=120)
        described = json.loads(said)
        assert process.returncode == 0
        assert described.pop("pid") == process.pid
        return described.pop("seeds"), described, error

    first, *forked = describe(cwd=tmp_path)
    # Where the server has imported torch.
    second, here, _ = describe("tasks.a_toy", start_new_session=True)
    assert (here["own session"], here["directory"]) == (True, os.getcwd())
    monkeypatch.setattr(subprocess.Popen, "_execute_child", fork_server._execute_child)
    third, started, error = describe(cwd=tmp_path)
    assert forked == [started, error]
    assert not started["own session"]
    assert here["loaded"] == started["loaded"]
    assert len({*first, *second, *third}) == 6
