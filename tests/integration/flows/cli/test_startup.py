"""Asking costs nothing: help, plans and looks at a store load nothing that is slow to load.

How long they take: tests.campaigns.reliability.test_plan_speed.
"""

import subprocess
import sys

import pytest

from tests.support.flows.shelf import make_manifest, put_artifact, put_run

HEAVY = (
    *(
        "torch",
        "prefect",
        "boto3",
        "botocore",
        "duckdb",
        "fastapi",
        "uvicorn",
        "uvloop",
        "pyarrow",
        "tiktoken",
    ),
    *("rich.progress", "flows.orchestration.pipeline", "flows.orchestration.stage_task"),
)
LIGHT = (
    *("--help", "plan --help", "run --help", "data --help", "config"),
    *("plan tiny", "plan tiny --json", "status"),
    *("ls", "ls tiny", "ls sft@tiny", "tag"),
)
LIST_NEEDS_NOT = ("flows.profiles", "flows.run_request")
PLAN_NEEDS_NOT = ("rich", "tomllib", "flows.profile_file")
SCRIPT = f"""
import sys
from flows.cli.app import main
for words in {LIGHT!r}:
    print("$", words, flush=True)
    main(words.split())
    if loaded := [name for name in {HEAVY!r} if name in sys.modules]:
        sys.exit(f"{{words}} loads {{loaded}}")
"""
FOLDERS = tuple(f"flows.cli.{name}." for name in ("train", "use", "artifacts", "machine"))
ONE = """
import sys
from flows.cli.app import main
main({words!r})
sys.exit(", ".join(name for name in sys.modules if name.startswith({folders!r})
                   or name in {names!r}) or 0)
"""


@pytest.mark.parametrize(
    ("words", "folders", "names"),
    [(["--help"], FOLDERS, LIST_NEEDS_NOT), (["plan", "tiny"], (), PLAN_NEEDS_NOT)],
    ids=["--help", "plan"],
)
@pytest.mark.usefixtures("store")
def test_a_command_loads_no_module_that_it_can_do_without(words, folders, names):
    script = ONE.format(words=words, folders=folders, names=names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_asking_loads_nothing_heavy(store, tmp_path):
    put_run(store, "tiny-1", put_artifact(store, make_manifest("sft")))
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [answer.count("\n") > 1 for answer in done.stdout.split("$ ")[1:]] == [True] * len(LIGHT)
