"""Histories of a store whose garbage is collected while runs use it, each drawn from a seed."""

import random
from collections.abc import Callable
from pathlib import Path

from flows.gc.reach import Rules
from tests.support.reliability import gc_actors as actors
from tests.support.reliability.gc_referee import Referee
from tests.support.reliability.histories import History, Simulation, Tally
from tests.support.reliability.sim_actors import TERMS, Scene, open_scratch
from tests.support.reliability.sim_store import Objects, SimStore
from tests.support.reliability.sim_world import Process, World

DAY = 86400.0  # virtual seconds
RULES = Rules(keep=30 * DAY, grace=DAY)
FAULTS = {"lost request": 0.01, "lost answer": 0.01, "retried": 0.02, "duplicate": 0.02}
FAULTS |= {"slow": 0.1, "crash": 0.004, "damaged": 0.01}
_GAPS = (0.3, 1.1, 2.0, 10.0)  # days between one crowd and the next
_SECONDS_OF_CROWD = 25.0
_SECONDS_TO_END = 3600.0


class _Simulation(Simulation):
    def __init__(self, seed: int, rules: Rules, scratch: Path, trace: list[str] | None) -> None:
        rng = random.Random(seed)
        calm = {"slow": FAULTS["slow"]}
        super().__init__(rng, World(seed, faults=rng.choice((FAULTS, calm)), trace=trace))
        self.referee = Referee(Objects(self.world), rules, ttl=TERMS.ttl)
        self.scene = Scene(
            world=self.world, referee=self.referee, open_store=SimStore, scratch=scratch
        )
        self.rules = rules

    def run(self) -> None:
        """Crowds of processes, with days between them; then collections."""
        for number in range(self.rng.randint(2, 3)):
            self.crowd(f"calm{number}", is_tense=False)
            self.let_rot()
            self.crowd(f"tense{number}", is_tense=True)
            self.wait_until(self.world.now + self.rng.choice(_GAPS) * DAY)
        self.collect_rest(2)

    def let_rot(self) -> None:
        """Runs are forgotten, and a collection marks what they leave: the next one deletes it."""
        self.wait_until(self.world.now + self.rules.keep + DAY)
        self.collect_rest(1)

    def crowd(self, name: str, *, is_tense: bool) -> None:
        """Who comes at about the same time; a tense crowd meets a collection that deletes."""
        rng, world, scene = self.rng, self.world, self.scene
        for _ in range(rng.choice((1, 1, 2) if is_tense else (0, 1))):
            self.start("gc", lambda p: actors.Collector(scene, p))
        for number in range(rng.choice((1, 2, 3))):
            facts = actors.draw_run(world, f"{rng.choice(('tiny', 'd12', name))}")
            self.start(f"run{number}", lambda p, f=facts: actors.Runner(scene, p, **f))
        for calm, tense, actor in (
            (0.6, 0.6, actors.Accepter),
            (0.2, 0.8, actors.Tagger),
            (0.2, 0.2, actors.Revoker),
        ):
            if rng.random() < (tense if is_tense else calm):
                self.start(actor.__name__.lower(), lambda p, a=actor: a(scene, p))
        if rng.random() < 0.4:
            when = world.now + rng.random() * _SECONDS_OF_CROWD
            world.at(when, lambda _: self.pause_one(), None)

    def start(self, name: str, program: Callable[[Process], actors.Actor]) -> None:
        """A process of its own home, in a while."""
        number = len(self.world.trace or ()) + self.world.operations
        process = Process(name, f"{name}-{number}", self.rng.uniform(-300.0, 300.0))
        self.begin(process, program, after=_SECONDS_OF_CROWD * self.rng.random())

    def on_death(self, process: Process) -> None:
        """Start it again, perhaps."""
        if process in self.running and self.rng.random() < 0.4:
            self.start_again(process)
        self.running.pop(process, None)

    def pause_one(self) -> None:
        """A process stops for longer than a lease lasts, perhaps."""
        collectors = [process for process in self.running if process in self.referee.collectors]
        if crowd := collectors or list(self.running):
            self.world.pause(self.rng.choice(crowd))

    def wait_until(self, moment: float) -> None:
        """Let the world live until then."""
        self.world.at(moment, lambda _: None, None)
        self.world.run(lambda: self.world.now >= moment, before=moment + 1)

    def collect_rest(self, times: int) -> None:
        """Collections, the grace between them."""
        for _ in range(times):
            self.start("gc", lambda p: actors.Collector(self.scene, p))
            self.wait_until(self.world.now + self.rules.grace + _SECONDS_TO_END)


def simulate(seed: int, *, rules: Rules = RULES, trace: bool = False) -> History:
    """One history."""
    lines: list[str] = []
    with open_scratch() as scratch:
        simulation = _Simulation(seed, rules, scratch, lines if trace else None)
        return simulation.play(seed, lines, actors.simulated_pipeline(simulation.world))


def check(tally: Tally) -> None:
    """Nothing broke, and enough happened in these histories."""
    assert tally.broken == {}
    assert tally.met["deleted"] > 10 * tally.histories  # objects
    assert tally.met["reused"] > tally.histories  # artifacts
    assert tally.met["waited"] > tally.histories  # for a collection
