"""The tests marked `gpu`, in the files of tests/gpu.txt: `python -m bench.gpu.gpu_tests`."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.report import needs_gpu, result, say

ROOT = Path(__file__).resolve().parents[2]
# Skips that are right on one Hopper GPU: packages that are not there, and a second GPU.
RIGHTLY = re.compile(r"\b(fa2|fa3|fa4): |one GPU here")
NO_GPU = re.compile(r"no GPU|needs a GPU|SKIPPED .* GPU")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def main() -> None:
    """Run them; exit 1 if one fails, or is skipped on a GPU without a good reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    files = (ROOT / "tests" / "gpu.txt").read_text().split()
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider"]
    # Of a machine's plugins only ours: another's warning is an error here, and ends the run.
    command += ["-p", "xdist", "-p", "pytest_timeout"]
    command += ["-n", str(options.workers)] if options.workers else []
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = done.stdout.splitlines() or [""]  # pytest or a plugin is missing: stderr says which
    counts = {kind: int(number) for number, kind in COUNT.findall(lines[-1])}
    skips = [line for line in lines if line.startswith("SKIPPED")]
    wrong = [line for line in skips if not RIGHTLY.search(line)]
    result("tests", counts=counts, skips=skips)
    say(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    if wrong and all(NO_GPU.search(line) for line in wrong) and not counts.get("passed"):
        needs_gpu(f"{counts.get('skipped', 0)} tests")
        wrong = []
    for line in wrong:
        say(f"skipped without a good reason: {line}")
    sys.exit(1 if done.returncode or wrong else 0)


if __name__ == "__main__":
    main()
