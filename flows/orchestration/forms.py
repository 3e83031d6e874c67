"""What Prefect's forms ask for: one type for each parameter of our flows, with its label and rules.

The rules are part of a deployment's schema: the form shows them, and the server refuses a run that
breaks one, naming the field. A caller in Python is not held to them: the flow itself looks at what
it is given, and says more of it in one line. Nothing here needs Prefect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from flows.artifacts.names import MODELS
from flows.profiles import PROFILES
from flows.stages import REPORT, STAGES
from infra.placement import CPU_POOL, SETTINGS

LABEL = "label"  # where the schema has the name that people read, until the deployment is made
MOST_NODES = 64
MOST_GPUS = 64  # of one machine
MOST_RETRIES = 100

_NULL = {"type": "null"}
_STAGE_NAMES = [stage.name for stage in STAGES]
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_SETTING = r"^\s*[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\s*="


@dataclass(frozen=True)
class FormField:
    """How a form shows a parameter, and the JSON schema's rules for it."""

    label: str
    rules: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """The schema of the type with these rules in it.

        One that may be None is shown as an ordinary field that may be left empty: alternatives
        would be tabs in the form, and errors that do not say which rule was broken.
        """
        schema = dict(handler(core_schema))
        for kind in schema.pop("anyOf", ()):
            schema |= {} if kind == _NULL else kind
        return {**schema, **self.rules, LABEL: self.label}


def _texts(**rules: Any) -> dict[str, Any]:
    """Rules of a list of texts, each of which has these rules."""
    return {"items": {"type": "string", **rules}, "uniqueItems": True}


ProfileField: TypeAlias = Annotated[str, FormField("Profile", {"enum": list(PROFILES)})]
SuiteField: TypeAlias = Annotated[
    str | None, FormField("Profile of the questions", {"enum": list(PROFILES)})
]
DepthField: TypeAlias = Annotated[
    int | None, FormField("Depth", {"minimum": 1, "maximum": 100, "examples": [12]})
]
OverridesField: TypeAlias = Annotated[
    tuple[str, ...],
    FormField(
        "Changed settings", _texts(pattern=_SETTING, examples=["pretrain.num_steps=100", "seed=7"])
    ),
]
FromStageField: TypeAlias = Annotated[
    str | None, FormField("Redo from stage", {"enum": _STAGE_NAMES})
]
ForceField: TypeAlias = Annotated[
    tuple[str, ...], FormField("Redo stages", _texts(enum=_STAGE_NAMES))
]
UseField: TypeAlias = Annotated[
    tuple[str, ...],
    FormField(
        "Use artifacts",
        _texts(
            pattern=rf"^(({'|'.join(n for n in _STAGE_NAMES if n != REPORT.name)})"
            rf"(@{_NAME}|/[0-9a-f]+)|{_NAME})$",
            examples=["pretrain@main", "sft/1a2b3c"],
        ),
    ),
]
RunNameField: TypeAlias = Annotated[
    str | None, FormField("Name of the run", {"pattern": rf"^{_NAME}$", "maxLength": 100})
]
StoreField: TypeAlias = Annotated[
    str | None,
    FormField(
        "Store",
        {
            "pattern": r"^(file:///|s3://[^/@]+(/|$))",
            "examples": ["s3://bucket/prefix", "file:///data"],
        },
    ),
]
GpusField: TypeAlias = Annotated[
    int | None, FormField("GPUs of each machine", {"minimum": 0, "maximum": MOST_GPUS})
]
NodesField: TypeAlias = Annotated[int, FormField("Machines", {"minimum": 1, "maximum": MOST_NODES})]
PoolField: TypeAlias = Annotated[
    str | None,
    FormField(
        "Work pool of GPU stages",
        {"pattern": rf"^(?!{CPU_POOL}$)[^/%&><\s]+$", "maxLength": 100},  # see check_gpu_pool
    ),
]
PlaceField: TypeAlias = Annotated[
    tuple[str, ...],
    FormField(
        "Changed placement",
        _texts(pattern=rf"^({'|'.join(SETTINGS)})=", examples=["device_batch_size=8"]),
    ),
]
RetriesField: TypeAlias = Annotated[
    int, FormField("Retries of a lost stage", {"minimum": 0, "maximum": MOST_RETRIES})
]
StrictField: TypeAlias = Annotated[bool, FormField("Strict")]

ModelField: TypeAlias = Annotated[
    str,
    FormField(
        "Model",
        {
            "pattern": rf"^(({'|'.join(MODELS)})(@{_NAME}|/[0-9a-f]+)|{_NAME})$",
            "examples": ["main", "sft@main", "sft/1a2b3c"],
        },
    ),
]
MetricField: TypeAlias = Annotated[
    str | None, FormField("Metric", {"pattern": r"^[a-z0-9_]+$", "examples": ["chatcore"]})
]
DropField: TypeAlias = Annotated[float, FormField("Drop allowed", {"minimum": 0})]
