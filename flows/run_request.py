"""The request for a run, and its parameters, each declared once: type, help, label, group, rules.

`RunRequest` is what the command line (flows/cli/options.py) and the form in Prefect's pages
(flows/orchestration/forms.py) make, and what a run reads. Requests for sweeps, evaluations and
single stages have parameters of the same declarations; `shared` passes the values on.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from flows.profiles import PROFILES
from flows.stages import REPORT, STAGES
from infra.placement import CPU_POOL, NO_POOL, POOL_NAME, SETTINGS
from nanochat_core.errors import ConfigError

_Request = TypeVar("_Request")

# A form shows the groups in this order. The first two, what is trained or evaluated and its
# settings, are part of a result's identity; the placement never is.
Group: TypeAlias = Literal["what", "settings", "stages", "placement", "run"]
GROUPS: tuple[Group, ...] = get_args(Group)
LABEL = "label"  # key of a label in the schema: Prefect writes `title` itself

MAX_NODES = 64
MAX_GPUS = 64  # of one machine
MAX_RETRIES = 100
# Retries in a row without a new step. A stage that fails more often has another fault.
# On several nodes this, with the pauses, also limits a store's outage: some three minutes.
RETRIES = 5

NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_SETTING = r"^\s*[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\s*="
_NULL = {"type": "null"}
SOURCES = {"hf://": "hub", "s3://": "s3"}  # what begins the address of a text -> shards.source
_STAGES = [stage.name for stage in STAGES]
_USABLE = "|".join(name for name in _STAGES if name != REPORT.name)


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of a parameter, besides its name, type and default.

    The rules, in JSON schema, bind forms and API clients: the server names the field that breaks
    one. They do not bind a caller in Python: the flow checks again, with better messages.
    """

    label: str  # in a form
    help: str  # a plain sentence
    group: Group
    rules: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flag: str | None = None  # on the command line; None: the parameter's name; "": an argument
    more: str = ""  # sentences that only the command line has room for

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Return the schema of the type with these rules added."""
        text = self.help.replace("`", "")  # a form shows plain text
        schema = {**handler(core_schema), LABEL: self.label, "description": text}
        # `T | None` becomes T, a field that may be left empty: the form shows `anyOf` as tabs, and
        # the server's errors do not say which rule of it was broken.
        for kind in schema.pop("anyOf", ()):
            schema |= {} if kind == _NULL else kind
        return {**schema, **self.rules}


def options_of(kind: type[Any]) -> dict[str, tuple[Any, Option]]:
    """Return type and declaration of each parameter of a dataclass, in the order of the groups."""
    found: dict[str, tuple[Any, Option]] = {}
    hints = get_type_hints(kind, include_extras=True)
    for hint, name in ((hints[item.name], item.name) for item in fields(kind)):
        for declared in getattr(hint, "__metadata__", ()):
            if isinstance(declared, Option):
                found[name] = get_args(hint)[0], declared

    def rank(item: tuple[str, tuple[Any, Option]]) -> tuple[int, bool]:
        kind, option = item[1]
        return GROUPS.index(option.group), is_list(kind)  # lists last: they take the most room

    return dict(sorted(found.items(), key=rank))


def is_list(kind: Any) -> bool:
    """Return whether a type is that of a parameter that may be given several times."""
    return get_origin(kind) is tuple


def shared(kind: type[Any], *sources: Any) -> dict[str, Any]:
    """Return the values of the fields of dataclasses that the dataclass `kind` has too."""
    names = {item.name for item in fields(kind)}
    found = [(item.name, source) for source in sources for item in fields(source)]
    return {name: getattr(source, name) for name, source in found if name in names}


def list_of(**rules: Any) -> dict[str, Any]:
    """Return the rules of a list of distinct strings, each with these rules."""
    return {"items": {"type": "string", **rules}, "uniqueItems": True}


PROFILE = Option(
    label="Profile",
    help="Name of a profile; `nanochat config` lists them.",
    more="Or a profile of your own in a TOML file, as `nanochat config` writes it.",
    group="what",
    flag="",
    rules={"enum": list(PROFILES)},
)
DEPTH = Option(
    label="Depth",
    help="Number of transformer layers; the other sizes follow from it.",
    group="settings",
    rules={"minimum": 1, "maximum": 100, "examples": [12]},
)
OVERRIDES = Option(
    label="Changed settings",
    help="Changed settings, each as section.name=value, such as pretrain.num_steps=100.",
    group="settings",
    flag="--set",
    rules=list_of(pattern=_SETTING, examples=["pretrain.num_steps=100", "seed=7"]),
)
USE = Option(
    label="Use artifacts",
    help="Artifacts to use for their stages, such as pretrain@other or sft/1a2b3c.",
    more="Those stages and their inputs are skipped. Ends without a report card.",
    group="stages",
    rules=list_of(
        pattern=rf"^(({_USABLE})(@{NAME}|/[0-9a-f]+)|{NAME})$",
        examples=["pretrain@main", "sft/1a2b3c"],
    ),
)
RUN_NAME = Option(
    label="Name of the run",
    help="Name of the run; by default the profile's, with a suffix if any setting is changed.",
    group="run",
    flag="--name",
    rules={"pattern": rf"^{NAME}$", "maxLength": 100},
)
GPUS = Option(
    label="GPUs per machine",
    help="GPUs of each machine; 0 for the CPU, default all.",
    group="placement",
    rules={"minimum": 0, "maximum": MAX_GPUS},
)
STRICT = Option(
    label="Strict code check",
    help="Treat code that the fingerprint does not cover as an error.",
    group="run",
)
POOL = Option(
    label="Work pool for GPU stages",
    help="Work pool whose workers run the GPU stages, such as gpu; none means the run's own "
    "process.",
    group="placement",
    # See check_gpu_pool.
    rules={"pattern": rf"^(?!{CPU_POOL}$){POOL_NAME}$"},
)
NODES = Option(
    label="Machines",
    help="Machines for each GPU stage; more than one needs a pool of Slurm or Kubernetes.",
    group="placement",
    rules={"minimum": 1, "maximum": MAX_NODES},
)
RETRY = Option(
    label="Retries per stage",
    help="Retries of a stage that lost its process or machine; errors are not retried.",
    group="run",
    rules={"minimum": 0, "maximum": MAX_RETRIES},
)

# The parameters that several requests have.
ProfileName: TypeAlias = Annotated[str, PROFILE]
Depth: TypeAlias = Annotated[int | None, DEPTH]
Overrides: TypeAlias = Annotated[tuple[str, ...], OVERRIDES]
RunName: TypeAlias = Annotated[str | None, RUN_NAME]
Gpus: TypeAlias = Annotated[int | None, GPUS]
Strict: TypeAlias = Annotated[bool, STRICT]
Place: TypeAlias = Annotated[
    tuple[str, ...],
    Option(
        label="Placement settings",
        help="Changed placement settings, such as device_batch_size=8.",
        more="Names: docs/reference/placement.md.",
        group="placement",
        rules=list_of(pattern=rf"^({'|'.join(SETTINGS)})=", examples=["device_batch_size=8"]),
    ),
]
StoreUrl: TypeAlias = Annotated[
    str | None,
    Option(
        label="Store",
        help="URL of the artifact store; default NANOCHAT_STORE, else HOME/store.",
        group="placement",
        rules={
            "pattern": r"^(file:///|s3://[^/@]+(/|$))",
            "examples": ["s3://bucket/prefix", "file:///data"],
        },
    ),
]
GpuPool: TypeAlias = Annotated[str | None, POOL]
Nodes: TypeAlias = Annotated[int, NODES]
Retries: TypeAlias = Annotated[int, RETRY]


@dataclass(frozen=True, kw_only=True)
class BuildParameters:
    """Where something is built, and how. No result depends on it, up to rounding."""

    gpus: Gpus = None
    place: Place = ()
    store: StoreUrl = None
    pool: GpuPool = None
    retries: Retries = RETRIES
    strict: Strict = False


@dataclass(frozen=True, kw_only=True)
class RunRequest(BuildParameters):
    """A run of a profile: what is trained, which stages, and where."""

    profile: ProfileName = "tiny"
    depth: Depth = None
    overrides: Overrides = ()
    steps: Annotated[
        int | None,
        Option(
            label="Pretraining steps",
            help="Steps of pretraining; by default those of the profile.",
            group="settings",
            rules={"minimum": 1},
        ),
    ] = None
    data: Annotated[
        str | None,
        Option(
            label="Text to pretrain on",
            help="A folder's absolute path, hf://owner/name of the Hub, or s3://bucket/prefix; by "
            "default the profile's text.",
            group="settings",
            rules={
                "pattern": "^(/.|hf://[^/]+/.|s3://.)",
                "examples": ["/data/letters", "hf://owner/name", "s3://bucket/letters/*.parquet"],
            },
        ),
    ] = None
    use: Annotated[tuple[str, ...], USE] = ()
    until: Annotated[
        str | None,
        Option(
            label="Last stage",
            help="Build this stage and what it needs; by default all stages.",
            group="stages",
            rules={"enum": _STAGES},
        ),
    ] = None
    from_stage: Annotated[
        str | None,
        Option(
            label="Rebuild from stage",
            help="Rebuild this stage and everything after it.",
            group="stages",
            rules={"enum": _STAGES},
        ),
    ] = None
    force: Annotated[
        tuple[str, ...],
        Option(
            label="Rebuild stages",
            help="Stages to rebuild even if they are up to date.",
            group="stages",
            rules=list_of(enum=_STAGES),
        ),
    ] = ()
    run_name: RunName = None
    nodes: Nodes = 1

    @property
    def resolved(self) -> "RunRequest":
        """Return the request with the settings that steps and data stand for among its overrides.

        Raises ConfigError if one of them is among the overrides too.
        """
        changed = {} if self.steps is None else {"pretrain.num_steps": str(self.steps)}
        changed |= {} if self.data is None else text_settings(self.data)
        for name in (override.partition("=")[0].strip() for override in self.overrides):
            if name in changed:
                raise ConfigError(
                    f"{name} is set twice: to {changed[name]} by a field of its own",
                    hint="leave it out of the changed settings, or leave the field empty",
                )
        more = (f"{name}={value}" for name, value in changed.items())
        return replace(self, overrides=(*self.overrides, *more), steps=None, data=None)


def request_of(kind: type[_Request], parameters: Mapping[str, Any]) -> _Request:
    """Return the request that a form's parameters stand for."""
    # An emptied field sends nothing, which means the deployment's pool: "none" asks for none.
    pool = {"pool": None} if parameters.get("pool") == NO_POOL else {}
    return kind(**{**parameters, **pool})


def absolute_text(data: str, folder: Path = Path()) -> str:
    """Return a text's address; of a path, which is relative to `folder`, the absolute one.

    Raises ConfigError if it is empty, as a shell's unset variable is.
    """
    if not data:
        raise ConfigError("the address of a text is empty", hint="give a folder, hf:// or s3://")
    return data if data[:5] in SOURCES else os.path.abspath(folder / Path(data).expanduser())


def text_settings(data: str) -> dict[str, str]:
    """Return the settings that choose a text: a folder's path, hf://owner/name or s3://bucket/..."""
    source = SOURCES.get(data[:5])
    path = data if source is None else data[5:]
    return {"shards.path": path, "shards.source": source or "local"}
