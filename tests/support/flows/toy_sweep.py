"""A sweep of toy stages, in this process or in one that kills itself: DIRECTORY [EVENTS].

The process ends by SIGKILL after so many events of its stages; without a number it runs to the end.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.identity.fingerprint import REPOSITORY
from flows.stages import Stage
from flows.sweep.grid import Sweep, open_sweep
from flows.sweep.plan import units_of
from flows.sweep.request import SweepRequest
from tests.support.flows.fixtures import Toys
from tests.support.flows.house import make_run

TEXT = """
def run(job):
    (job.output / "text").write_text(str(job.config["seed"]))
    return {}
"""
# The best learning rate is 0.03; the seed changes the score more than the rate does. A file named
# after the rate in HOME/broken makes it fail.
PRETRAIN = """
def run(job):
    rate, seed = job.config["optimizer"]["muon_lr"], job.config["seed"]
    if (job.directory.parents[2] / "broken" / str(rate)).exists():
        raise ValueError("broken")
    (job.output / "model").write_text(f"{rate} {seed}")
    return {"val_bpb": seed + abs(rate - 0.03) * (1 + seed / 10)}
"""


def toy_sweep(*vary: str, **options: Any) -> Sweep:
    """A sweep of tiny, by default with three seeds, called toy."""
    return open_sweep(SweepRequest(vary=vary, **{"seeds": (1, 2, 3), "run_name": "toy", **options}))


def make_stages(toys: Toys) -> list[Stage]:
    """text -> pretrain, which depends on the optimizer"""
    text = toys.stage("text", source=TEXT)
    pretrain = toys.stage("pretrain", text, compute="gpu", source=PRETRAIN)
    return [text, replace(pretrain, config=("seed", "optimizer"))]


def run_sweep(toys: Toys, sweep: Sweep, name: str, **context: Any) -> Any:
    """Run it as a flow run of this name; returns what it made."""
    from prefect import flow

    from flows.sweep.build import build_units

    units = units_of(sweep, make_stages(toys))
    runs = {
        m.label: replace(make_run(f"{m.request.run_name}-{name}"), name=m.request.run_name)
        for m in sweep.members
    }

    @flow(name="toy-sweep", flow_run_name=name)
    def toy_flow() -> Any:
        return build_units(sweep, units, replace(toys.context(name), **context), runs)

    return toy_flow()


def run_process(toys: Toys, *words: str) -> int:
    """Run it in a process of its own, with the Prefect server of this one; returns its exit."""
    command = [sys.executable, "-m", "tests.support.flows.toy_sweep", str(toys.home.parent), *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True).returncode


def main() -> None:
    """Run the sweep of the toys in DIRECTORY."""
    directory = Path(sys.argv[1])
    toys = Toys(root=directory / "root", home=directory / "home")
    left = int(sys.argv[2]) if len(sys.argv) > 2 else -1

    def watch(stage: str, event: dict[str, Any]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sweep = toy_sweep("optimizer.muon_lr=0.01,0.028,0.05,0.5")
    run_sweep(toys, sweep, f"toy-{os.getpid()}", watch=watch)


if __name__ == "__main__":
    main()
