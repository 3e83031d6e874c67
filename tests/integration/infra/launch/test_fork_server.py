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
if sys.argv[3:]:
    exec(sys.argv[2])
    sys.exit()
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


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """start(code) -> a worker that describes itself, or runs `code`."""
    package = tmp_path / "code" / "nanochat_core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(WORKER)
    (tmp_path / "code" / "sitecustomize.py").touch()  # which an interpreter imports when it starts
    job = tmp_path / "job.json"

    def start(
        *code: str, entry: str = "nanochat_core.train.pretrain", **options: Any
    ) -> subprocess.Popen[str]:
        job.write_text(json.dumps({"entry": entry}))
        words = [str(job), *code, str(job)]  # the server reads the job named last
        return subprocess.Popen(
            [sys.executable, "-m", "nanochat_core.worker", *words],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "code"), "PYTHONSAFEPATH": "1",
                 "PYTHONHASHSEED": "0", "NANOCHAT_LAUNCHER": str(os.getpid())},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            **options,
        )  # fmt: skip

    return start


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fresh() makes Popen start processes itself until the test ends."""
    real = fork_server._execute_child
    return lambda: monkeypatch.setattr(subprocess.Popen, "_execute_child", real)


def test_it_differs_from_a_started_process_in_its_numbers_alone(
    start: Any, fresh: Any, tmp_path: Path
) -> None:
    def describe(**options: Any) -> tuple[list[float], dict[str, Any], str]:
        process = start(**options)
        said, error = process.communicate(timeout=120)
        described = json.loads(said)
        assert process.returncode == 0
        assert described.pop("pid") == process.pid
        return described.pop("seeds"), described, error

    first, *forked = describe(cwd=tmp_path)
    # Where the server has imported torch.
    second, here, _ = describe(entry="tasks.a_toy", start_new_session=True)
    assert (here["own session"], here["directory"]) == (True, os.getcwd())
    fresh()
    third, started, error = describe(cwd=tmp_path)
    assert forked == [started, error]
    assert not started["own session"]
    assert here["loaded"] == started["loaded"]
    assert len({*first, *second, *third}) == 6


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit(3)",
        "sys.exit('why')",
        "sys.exit()",
        "raise ValueError('why')",
        "os._exit(4)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.abort()",
        "import atexit; atexit.register(print, 'last')",
        "import threading, time; threading.Timer(0.1, print, ['late']).start(); sys.exit(5)",
    ],
)
def test_it_ends_as_a_started_process_does(start: Any, fresh: Any, code: str) -> None:
    def end() -> tuple[int, str, list[str]]:
        process = start(code)
        said, error = process.communicate(timeout=120)
        return process.returncode, said, error.splitlines()[-1:]

    forked = end()
    fresh()
    assert forked == end()
