"""What artifacts cost: the time, GPU-hours and dollars of the jobs that made them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flows.building.build import Built
from flows.render.text import duration, money


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of several artifacts, summed over all executions of their jobs."""

    stages: int
    seconds: float
    gpu_hours: float
    dollars: float  # 0 where no price was given

    def __str__(self) -> str:
        gpus = f", {self.gpu_hours:.3g} GPU-hours" if self.gpu_hours else ""
        return f"{self.stages} stages, {duration(self.seconds)}{gpus}, {money(self.dollars)}"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a sweep cost: the stages that this flow run built, and those that it reused."""

    built: Cost
    cached: Cost

    @property
    def lines(self) -> Iterator[str]:
        """The cost as sentences."""
        yield f"built now: {self.built}"
        yield f"reused: {self.cached}"


def spent_on(artifacts: Iterable[Built]) -> Spent:
    """Sum up artifacts. One that an earlier, interrupted flow run began counts as built now."""
    found = list(artifacts)
    return Spent(
        built=_cost([built for built in found if not built.cached]),
        cached=_cost([built for built in found if built.cached]),
    )


def _cost(artifacts: list[Built]) -> Cost:
    made = [built.manifest.provenance for built in artifacts]
    gpus = (
        (s.get("ended", 0.0) - s.get("started", 0.0)) * s.get("processes", 1)
        for each in made
        for s in each.segments
        if s.get("device") == "cuda"
    )
    return Cost(
        stages=len(artifacts),
        seconds=math.fsum(each.seconds for each in made),
        gpu_hours=math.fsum(gpus) / 3600,
        dollars=math.fsum(each.dollars for each in made),
    )
