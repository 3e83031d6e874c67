"""The parameters of an evaluation, each declared once: see `flows.run_request`."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from flows.profiles import PROFILES
from flows.run_request import (
    NAME,
    RETRIES,
    GpuPool,
    Gpus,
    Option,
    Overrides,
    Place,
    Retries,
    StoreUrl,
    Strict,
)
from flows.stages import EVALUATORS

Against: TypeAlias = Literal["previous", "best"]
DROP = 0.02  # of a score between 0 and 1: two questions of a hundred

MODEL = Option(
    label="Model",
    help="A tag or a run's name, a stage of one (sft@main) or a fingerprint (sft/1a2b3c).",
    more="A name is its newest chat model. It is looked up for every evaluation. On the command "
    "line also hf://OWNER/NAME or ./DIRECTORY, of nanochat or transformers.",
    group="what",
    flag="",
    rules={
        "pattern": rf"^(({'|'.join(EVALUATORS)})(@{NAME}|/[0-9a-f]+)|{NAME})$",
        "examples": ["main", "sft@main", "sft/1a2b3c"],
    },
)


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """An evaluation of a model: the suite, the rule for what counts as worse, and where."""

    model: Annotated[str, MODEL] = "main"
    profile: Annotated[
        str | None,
        Option(
            label="Profile of the evaluation",
            help="Profile whose evaluation is used; by default that of the model's own run.",
            group="settings",
            rules={"enum": list(PROFILES)},
        ),
    ] = None
    metric: Annotated[
        str | None,
        Option(
            label="Metric",
            help="The number that must not get worse; by default chatcore, core or val_bpb.",
            group="settings",
            rules={"pattern": r"^[a-z0-9_]+$", "examples": ["chatcore"]},
        ),
    ] = None
    drop: Annotated[
        float,
        Option(
            label="Allowed drop",
            help="By how much it may get worse without an alert, in its own unit.",
            group="settings",
            rules={"minimum": 0},
        ),
    ] = DROP
    against: Annotated[
        Against,
        Option(
            label="Compared with",
            help="The evaluation to compare with: the previous one, or the best one so far.",
            group="settings",
        ),
    ] = "previous"
    overrides: Overrides = ()
    gpus: Gpus = None
    place: Place = ()
    store: StoreUrl = None
    pool: GpuPool = None
    retries: Retries = RETRIES
    strict: Strict = False
