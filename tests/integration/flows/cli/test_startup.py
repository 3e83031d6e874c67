"""Asking costs nothing: help, plans and looks at a store load nothing that is slow to load.

How long they take: tests.campaigns.reliability.test_plan_speed.
"""

import subprocess
import sys
from pathlib import Path

from infra.storage.base import Store
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
        "pyarrow",
        "tiktoken",
    ),
    *("rich.progress", "flows.orchestration.pipeline", "flows.orchestration.stage_task"),
)
LIGHT = (
    *("--help", "plan --help", "run --help", "data stats --help", "profiles"),
    *("plan tiny", "plan tiny --json", "status"),
    *("ls", "ls tiny", "ls sft@tiny", "tag", "diff tiny tiny"),
)
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
LIST = f"""
import sys
from flows.cli.app import main
main(["--help"])
sys.exit(", ".join(name for name in sys.modules if name.startswith({FOLDERS!r})) or 0)
"""


def test_the_list_of_commands_loads_no_command() -> None:
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_asking_loads_nothing_heavy(store: Store, tmp_path: Path) -> None:
    put_run(store, "tiny-1", put_artifact(store, make_manifest("sft")))
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [answer.count("\n") > 1 for answer in done.stdout.split("$ ")[1:]] == [True] * len(LIGHT)
