"""Histories of the commit protocol, drawn from seeds.

    .venv/bin/python -m tests.support.reliability.simulation --seed 4711

shows every operation of one history; `--gc` shows one of gc_histories.py. For some virtual minutes
things go wrong; then nothing does any more, and all processes that still run, and a new one, must
come to an end.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.reliability import gc_histories
from tests.support.reliability.histories import MAX_SHOWN, Broken, History, Simulation, Tally
from tests.support.reliability.sim_actors import (
    IDENTITY,
    TERMS,
    Actor,
    Builder,
    Reader,
    Reviser,
    Scene,
    open_scratch,
    simulated,
)
from tests.support.reliability.sim_invariants import Referee
from tests.support.reliability.sim_mutations import MUTATIONS
from tests.support.reliability.sim_s3 import SimS3Store
from tests.support.reliability.sim_store import Objects, SimStore
from tests.support.reliability.sim_world import Machine, Process, World, draw_faults

FAULTY_SECONDS = 900.0  # virtual; then nothing goes wrong any more
SECONDS_TO_RECOVER = 1500.0  # virtual: the longest pause, a lease's time, a few jobs
_SAME, _OTHER = b"what the stage makes", b"what it makes on another machine"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What sort of histories."""

    mutation: str = ""  # the protection that is missing
    gc: bool = False  # runs of three stages, and collections

    def command(self, seed: int) -> str:
        """Return the command that shows a history."""
        mutation = f" --mutation {self.mutation}" if self.mutation else ""
        module = "tests.support.reliability.simulation"
        return f".venv/bin/python -m {module} --seed {seed}{mutation}{' --gc' * self.gc}"


PLAIN = Kind()


class _Simulation(Simulation):
    def __init__(self, seed: int, kind: Kind, *, scratch: Path, trace: list[str] | None) -> None:
        rng = random.Random(seed)
        chosen = MUTATIONS[kind.mutation].store if kind.mutation else None
        store = chosen or rng.choice((SimStore, SimS3Store))
        faults = draw_faults(rng)
        faults["retried" if issubclass(store, SimS3Store) else "refused"] = 0.0  # does not happen
        super().__init__(rng, World(seed, faults=faults, trace=trace))
        self.referee = Referee(
            Objects(self.world), IDENTITY, ttl=TERMS.ttl, contents={_SAME, _OTHER}
        )
        self.scene = Scene(
            world=self.world, referee=self.referee, open_store=store, scratch=scratch
        )
        for number in range(rng.choice((1, 2, 2, 3))):
            self.start(f"run-{number}", self.draw_builder(f"run-{number}"))
        if rng.random() < 0.5:
            self.start("reader", partial(Reader, self.scene))
        if rng.random() < 0.25:
            self.start("reviser", partial(Reviser, self.scene))

    def draw_builder(self, run: str) -> Callable[[Process], Builder]:
        force, rude = (self.rng.random() < 0.2 for _ in range(2))
        if force:
            self.referee.forced.add(run)
        return partial(
            Builder,
            self.scene,
            run=run,
            content=self.rng.choice((_SAME, _SAME, _OTHER)),
            force=force,
            rude=rude,
        )

    def start(self, name: str, program: Callable[[Process], Actor]) -> None:
        """On a machine of its own, or where an earlier one runs: in its home, or in a container."""
        rng, number = self.rng, len(self.programs)
        # Two machines may have one host name; some have no id.
        machine = Machine(rng.choice(("gpu", name)), id=rng.choice((name, None)), boot=number)
        home, namespace, user = name, 0, number
        if self.programs and rng.random() < 0.4:
            other = rng.choice(list(self.programs))
            machine, user = other.machine, rng.choice((other.user, number))
            namespace = rng.choice((other.namespace, number))
            if user == other.user and rng.random() < 0.5:
                home = other.home
        process = Process(name, home, rng.uniform(-300.0, 300.0), machine, namespace, user)
        self.begin(process, program, after=rng.choice((1.0, 100.0)) * rng.random())

    def on_death(self, process: Process) -> None:
        """Perhaps the machine is started again, and the process in the same home."""
        self.running.pop(process, None)
        machine = process.machine
        if process.boot == machine.boot and self.rng.random() < 0.1:
            self.world.reboot(machine)
        if self.rng.random() < 0.6:
            self.world.met["started again"] += 1
            # Another container may have the home of the one before.
            namespace = self.rng.choice((process.namespace, len(self.programs)))
            self.start_again(process, namespace=namespace)

    def run(self) -> None:
        self.world.run(lambda: not self.running, before=FAULTY_SECONDS)
        self.world.faulty = False
        self.start("last", partial(Builder, self.scene, run="last", content=_SAME))
        self.start("last-reader", partial(Reader, self.scene))
        until = self.world.now + SECONDS_TO_RECOVER
        if not self.world.run(lambda: not self.running, before=until):
            raise Broken(f"{sorted(p.name for p in self.running)} do not come to an end")
        self.referee.at_end()


def simulate(seed: int, kind: Kind = PLAIN, *, trace: bool = False) -> History:
    """One history."""
    with open_scratch() as scratch:
        return _simulate(seed, kind, scratch=scratch, trace=trace)


def _simulate(seed: int, kind: Kind, *, scratch: Path, trace: bool = False) -> History:
    if kind.gc:
        return gc_histories.simulate(seed, trace=trace)
    lines: list[str] = []
    simulation = _Simulation(seed, kind, scratch=scratch, trace=lines if trace else None)
    missing = MUTATIONS[kind.mutation].patches if kind.mutation else ()
    return simulation.play(seed, lines, simulated(simulation.world, *missing))


def simulate_many(seeds: range, kind: Kind = PLAIN, *, max_broken: int = MAX_SHOWN) -> Tally:
    """Many histories, until `max_broken` of them broke."""
    tally = Tally()
    with open_scratch() as scratch:
        for seed in seeds:
            tally.count(_simulate(seed, kind, scratch=scratch))
            if len(tally.broken) == max_broken:
                break
    return tally


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="of the history to show")
    parser.add_argument("--mutation", default="", choices=("", *MUTATIONS), help="take this out")
    parser.add_argument("--gc", action="store_true", help="garbage is collected")
    given = vars(parser.parse_args())
    history = simulate(given.pop("seed"), Kind(**given), trace=True)
    lines = [line.replace(IDENTITY.ref.prefix, "PLACE") for line in history.trace]
    print(*lines, *([] if history.broken else ["all holds"]), sep="\n")  # noqa: T201
    return int(history.broken is not None)


if __name__ == "__main__":
    sys.exit(_main())
