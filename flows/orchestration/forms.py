"""Form fields of our flows in Prefect: one type for each parameter, with its label and rules.

The rules are part of a deployment's schema: the form shows them, and the server refuses a run that
breaks one, naming the field. They do not bind a caller in Python: the flow itself checks its
parameters, with better messages. Nothing here needs Prefect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from flows.artifacts.names import MODELS
from flows.profiles import PROFILES
from flows.stages import REPORT, STAGES
from infra.placement import CPU_POOL, SETTINGS

# Key of the label in the schema. Prefect writes `title` itself, from the parameter's name, so
# deployments/registry.py copies the label over it.
LABEL = "label"
MOST_NODES = 64
MOST_GPUS = 64  # of one machine
MOST_RETRIES = 100

_NULL = {"type": "null"}
_STAGE_NAMES = [stage.name for stage in STAGES]
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_SETTING = r"^\s*[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\s*="


@dataclass(frozen=True)
class FormField:
    """The label of a parameter in a form, and its rules in JSON schema."""

    label: str
    rules: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Return the schema of the type with these rules added."""
        schema = dict(handler(core_schema))
        # `T | None` becomes T, a field that may be left empty: the form shows `anyOf` as tabs, and
        # the server's errors do not say which rule of it was broken.
        for kind in schema.pop("anyOf", ()):
            schema |= {} if kind == _NULL else kind
        return {**schema, **self.rules, LABEL: self.label}


def _texts(**rules: Any) -> dict[str, Any]:
    """Return the rules of a list of distinct strings, each with these rules."""
    return {"items": {"type": "string", **rules}, "uniqueItems": True}


ProfileField: TypeAlias = Annotated[str, FormField("Profile", {"enum": list(PROFILES)})]
SuiteField: TypeAlias = Annotated[
    str | None, FormField("Profile of the evaluation", {"enum": list(PROFILES)})
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
    str | None, FormField("Rebuild from stage", {"enum": _STAGE_NAMES})
]
ForceField: TypeAlias = Annotated[
    tuple[str, ...], FormField("Rebuild stages", _texts(enum=_STAGE_NAMES))
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
    int | None, FormField("GPUs per machine", {"minimum": 0, "maximum": MOST_GPUS})
]
NodesField: TypeAlias = Annotated[int, FormField("Machines", {"minimum": 1, "maximum": MOST_NODES})]
PoolField: TypeAlias = Annotated[
    str | None,
    FormField(
        "Work pool for GPU stages",
        {"pattern": rf"^(?!{CPU_POOL}$)[^/%&><\s]+$", "maxLength": 100},  # see check_gpu_pool
    ),
]
PlaceField: TypeAlias = Annotated[
    tuple[str, ...],
    FormField(
        "Placement settings",
        _texts(pattern=rf"^({'|'.join(SETTINGS)})=", examples=["device_batch_size=8"]),
    ),
]
RetriesField: TypeAlias = Annotated[
    int, FormField("Retries per stage", {"minimum": 0, "maximum": MOST_RETRIES})
]
StrictField: TypeAlias = Annotated[bool, FormField("Strict code check")]

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
DropField: TypeAlias = Annotated[float, FormField("Allowed drop", {"minimum": 0})]
