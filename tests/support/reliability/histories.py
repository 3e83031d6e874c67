"""Histories of simulated processes, drawn from seeds: how one is run, and what many came to."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.reliability.sim_world import Process, World

MAX_SHOWN = 10


class Broken(BaseException):
    """An invariant does not hold. Nothing in the product catches it."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What one seed came to."""

    seed: int
    broken: str | None  # what did not hold
    operations: int
    met: Counter[str]  # what happened how often
    trace: list[str]


@dataclass(kw_only=True)
class Tally:
    """What many seeds came to."""

    histories: int = 0
    operations: int = 0
    met: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)  # seed -> what did not hold

    def count(self, history: History) -> None:
        """Count one more."""
        self.histories += 1
        self.operations += history.operations
        self.met += history.met
        if history.broken is not None:
            self.broken[history.seed] = history.broken

    def report(self, kind: Any) -> str:
        """One line for each history that broke, with the command that shows it."""
        shown = list(self.broken.items())[:MAX_SHOWN]
        lines = [f"{what}\n    {kind.command(seed)}" for seed, what in shown]
        return "\n".join([f"{len(self.broken)} of {self.histories} histories broke", *lines])


class Simulation:
    """The processes of one history."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self.rng = rng
        self.world = world
        self.programs: dict[Process, Callable[[Process], Any]] = {}  # of the dead ones too
        self.running: dict[Process, None] = {}  # in the order of their starts
        world.on_death = self.on_death

    def begin(self, process: Process, program: Callable[[Process], Any], *, after: float) -> None:
        """Start a process after so many virtual seconds."""
        actor = program(process)

        def main() -> None:
            actor.main()
            self.world.note(process, "is done")
            self.running.pop(process, None)

        self.programs[process] = program
        self.running[process] = None
        self.world.spawn(process, main, after=after)

    def start_again(self, process: Process, **changes: Any) -> None:
        """Start a process that follows a dead one in its home."""
        again = replace(process, name=f"{process.name}'", **changes)
        self.begin(again, self.programs[process], after=30.0 * self.rng.random())

    def on_death(self, process: Process) -> None:
        """Handle the death of a process."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the history to its end. Raises Broken."""
        raise NotImplementedError

    def play(self, seed: int, trace: list[str], patches: AbstractContextManager[None]) -> History:
        """Return what the seed comes to while the product's modules are patched."""
        world, broken = self.world, None
        with patches:
            try:
                self.run()
            except Broken as error:
                broken = str(error)
                trace.append(broken)
            finally:
                world.close()
        return History(
            seed=seed,
            broken=broken,
            operations=world.operations,
            met=world.met,
            trace=trace,
        )
