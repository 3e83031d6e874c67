"""The request for a sweep: see `flows.run_request`."""

from dataclasses import dataclass
from typing import Annotated

from flows.run_request import (
    RUN_NAME,
    BuildParameters,
    Depth,
    Nodes,
    Option,
    Overrides,
    ProfileName,
    list_of,
)
from flows.stages import BASE_EVAL, CHAT_EVALS, PRETRAIN

DEPTH = "model.depth"
SEEDS = (42, 43, 44)
# Stages whose artifact has a score, and its metric.
METRICS = {
    **{stage.name: "val_bpb" for stage in (PRETRAIN, BASE_EVAL)},
    **{stage.name: "chatcore" for stage in CHAT_EVALS},
}
VARY = Option(
    label="Varied settings",
    help="Settings to vary, each as section.name=value,value; every combination is a point.",
    more="Values that have commas are given as a JSON list.",
    group="settings",
    rules=list_of(pattern="=", examples=["optimizer.muon_lr=0.01,0.03"]),
)
STAGE = Option(
    label="Last stage",
    help="Stage whose score is compared: bits per byte, or ChatCORE after a chat stage.",
    group="settings",
    rules={"enum": list(METRICS)},
)
REDUCTION = Option(
    label="Reduction",
    help="After each seed one of so many points gets the next seed; 1 stops none.",
    group="settings",
    rules={"minimum": 1},
)


@dataclass(frozen=True, kw_only=True)
class SweepRequest(BuildParameters):
    """A sweep: the grid of settings, and where its runs are built."""

    profile: ProfileName = "tiny"
    depth: Depth = None
    vary: Annotated[tuple[str, ...], VARY] = ()
    seeds: Annotated[
        tuple[int, ...],
        Option(
            label="Seeds",
            help="Different seeds; all points are trained with the same ones, in this order.",
            group="settings",
            flag="",
            rules={"items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True},
        ),
    ] = SEEDS
    stage: Annotated[str, STAGE] = PRETRAIN.name
    reduction: Annotated[int, REDUCTION] = 2
    overrides: Overrides = ()
    run_name: Annotated[
        str | None,
        Option(
            label="Name of the sweep",
            help="Name of the sweep; its runs are NAME-p1-s42 and so on.",
            group="run",
            flag="--name",
            rules=RUN_NAME.rules,
        ),
    ] = None
    nodes: Nodes = 1

    @property
    def is_series(self) -> bool:
        """True if only the depth is varied."""
        return [text.partition("=")[0].strip() for text in self.vary] == [DEPTH]
