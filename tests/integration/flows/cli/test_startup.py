"""Asking costs nothing: help, plans and looks at a store load nothing that is slow to load.

How long they take: bench.scale.
"""

import subprocess
import sys

import pytest

from tests.support.flows.shelf import make_manifest, put_artifact, put_run

HEAVY = (
    *("torch", "prefect", "boto3", "botocore", "duckdb", "fastapi", "uvicorn", "uvloop", "pyarrow"),
    *("tiktoken", "rich.progress"),
    *("flows.orchestration.pipeline", "flows.orchestration.stage_task"),
)
COMMANDS = tuple(f"flows.cli.{name}." for name in ("train", "use", "artifacts", "machine"))
NEEDS_NOT = {  # in addition to what is heavy
    "--help": (*COMMANDS, "flows.profiles", "flows.run_request"),
    "plan tiny": ("rich", "tomllib", "flows.profile_file"),
}
LIGHT = (  # the commands of a process each
    ("--help",),
    (
        *("plan tiny", "plan --help", "run --help", "data --help", "config", "plan tiny --json"),
        *("status", "ls", "ls tiny", "ls sft@tiny", "tag"),
    ),
)
SCRIPT = f"""
import sys
from flows.cli.app import main
for words in sys.argv[1:]:
    print("$", words, flush=True)
    main(words.split())
    needs_not = {HEAVY!r} + {NEEDS_NOT!r}.get(words, ())
    loaded = [name for name in sys.modules for each in needs_not
              if name == each or each.endswith(".") and name.startswith(each)]
    if loaded:
        sys.exit(f"{{words}} loads {{loaded}}")
"""


@pytest.mark.parametrize("commands", LIGHT)
def test_asking_loads_nothing_that_it_can_do_without(store, commands):
    put_run(store, "tiny-1", put_artifact(store, make_manifest("sft")))
    argv = [sys.executable, "-c", SCRIPT, *commands]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    printed = [answer.count("\n") > 1 for answer in done.stdout.split("$ ")[1:]]
    assert printed == [True] * len(commands)
