"""`python -m tests.campaigns.end_to_end`: the walk on a fresh home, with a table of checks."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.campaigns.end_to_end.diary import Diary
from tests.campaigns.end_to_end.walk import walk
from tests.support.infra.stack.live import LiveStack

parser = argparse.ArgumentParser(prog="python -m tests.campaigns.end_to_end", description=__doc__)
parser.add_argument("--port", type=int, default=4200, help="of the Prefect server")
parser.add_argument(
    "--directory", type=Path, help="a new one, which is kept; default a passing one"
)
given = parser.parse_args()
with tempfile.TemporaryDirectory() as passing:
    directory = given.directory or Path(passing)
    directory.mkdir(parents=True, exist_ok=True)
    stack, diary = LiveStack(directory / "home", port=given.port), Diary()
    try:
        walk(stack, diary)
    finally:
        stack.end()
        sys.stdout.write(f"{diary.table()}\n")
