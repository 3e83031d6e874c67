"""Options shared by several commands: where (StoreOptions, PlacementOptions) and what (RunOptions).

Each class is a flat list of options on the command line. Most of them are parameters of runs, which
`flows.run_request` declares.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from flows.cli.output import print_warning
from flows.run_request import (
    DEPTH,
    GPUS,
    OVERRIDES,
    PROFILE,
    USE,
    Gpus,
    Option,
    Place,
    RunRequest,
    StoreUrl,
    is_list,
    options_of,
)
from infra.placement import (
    Placement,
    check_gpu_pool,
    count_gpus,
    default_cache_limit,
    default_home,
    default_store,
    device_for,
    missing_packages,
)
from infra.storage.base import Store
from infra.storage.files import writing
from infra.storage.open import open_store
from nanochat_core.errors import ConfigError
from nanochat_core.job import Attention

if TYPE_CHECKING:
    from flows.artifacts.cache import Cache
    from flows.sweep.request import SweepRequest

_Options = TypeVar("_Options")
# A command's own options come before those that it shares with others.
OPTIONS = Group("Options", sort_key=0)
WHAT = Group("What", sort_key=1)
WHERE = Group("Where and how (same results, up to rounding)", sort_key=2)


def parameter_of(option: Option, kind: Any = str) -> Parameter:
    """Return the option of the command line for a declared parameter of this type."""
    repeats = ["May be repeated."] if is_list(kind) else []
    return Parameter(
        name=option.flag or None,
        group=_group(option),
        help=" ".join(filter(None, [option.help, option.more, *repeats])),
        # Only the least: the most is that of a form, and a machine may have more.
        validator=Number(gte=option.rules["minimum"]) if "minimum" in option.rules else (),
    )


def _group(option: Option) -> Group:
    """Return the group of an option in the help."""
    if option.flag == "":
        return OPTIONS
    return WHERE if option.group in ("placement", "run") else WHAT


def as_options(options: type[_Options]) -> type[_Options]:
    """Make options of the command line of the declared parameters that a dataclass has.

    A command takes the profile or the model as an argument of its own.
    """
    options.__annotations__ |= {
        name: Annotated[
            kind,
            option,
            Parameter(parse=False) if option.flag == "" else parameter_of(option, kind),
        ]
        for name, (kind, option) in options_of(options).items()
    }
    return Parameter(name="*")(options)


def argv_of(options: Any) -> list[str]:
    """Return the options that were given as command line words, for a command to copy."""
    words: list[str] = []
    kind = cast("type[Any]", type(options))
    defaults = {item.name: item.default for item in fields(kind)}
    for name, (_, option) in options_of(kind).items():
        value: Any = getattr(options, name)
        # Defaults are left out: the suggested command stays as short as the user's own, and takes
        # them from the same environment.
        if value != defaults[name] and option.flag != "":
            flag = option.flag or f"--{name.replace('_', '-')}"
            for word in cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,)):
                words += [flag] if word is True else [flag, str(word)]
    return words


Positive: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1))]
NotNegative: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0))]
ProfileName: TypeAlias = Annotated[str, parameter_of(PROFILE)]
DepthFlag: TypeAlias = Annotated[int | None, parameter_of(DEPTH, int)]
SetFlag: TypeAlias = Annotated[tuple[str, ...], parameter_of(OVERRIDES, tuple[str, ...])]
UseFlag: TypeAlias = Annotated[tuple[str, ...], parameter_of(USE, tuple[str, ...])]
GpusFlag: TypeAlias = Annotated[int | None, parameter_of(GPUS, int)]
ArtifactName: TypeAlias = Annotated[
    str,
    Parameter(
        name="REF", help="STAGE@RUN, STAGE/FINGERPRINT, or a profile for its newest chat model."
    ),
]
ModelName: TypeAlias = Annotated[
    str,
    Parameter(
        help="A profile or a tag (its newest chat model), a stage of one (sft@tiny), a fingerprint "
        "(sft/1a2b3c), a model directory or hf://OWNER/NAME."
    ),
]
AsJson: TypeAlias = Annotated[bool, Parameter(name="--json", help="Print JSON for programs.")]

CHANGES = 3  # exit code: there is something to do, a difference, or a model that got worse
ExitCode: TypeAlias = Annotated[
    bool, Parameter(help="Exit with 3 if there is something to report, not with 0.")
]


def device_of(gpus: int | None) -> str:
    """Return the device that one model runs on: "cuda" or "cpu". Raises like `check_gpus`."""
    check_gpus(gpus)
    return device_for(count_gpus() if gpus is None else gpus)


def check_gpus(gpus: int | None) -> None:
    """Raise ConfigError if this machine has fewer GPUs than --gpus."""
    if gpus is not None and not 0 <= gpus <= count_gpus():
        raise ConfigError(
            f"--gpus is {gpus}, this machine has {count_gpus()}",
            hint="run `nanochat doctor`, or give --gpus 0",
        )


@as_options
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The home directory and the artifact store."""

    home: Annotated[
        Path | None,
        Option(
            label="Home",
            help="Directory of work and history; default NANOCHAT_HOME, else ~/.nanochat-flows.",
            group="placement",
        ),
    ] = None
    store: StoreUrl = None

    @property
    def argv(self) -> list[str]:
        """The given options as command line words, for a command that a user may copy."""
        return argv_of(self)

    @property
    def home_path(self) -> Path:
        """The home directory as an absolute path; it need not exist."""
        if self.home is None:
            return default_home()
        # Also what an unset variable gives: Path("") is Path("."). Work, store and caches would be
        # scattered over whatever directory the command runs in.
        if str(self.home) == ".":
            raise ConfigError(
                "--home is the current directory", hint="name a directory of its own for it"
            )
        return self.home.expanduser().absolute()

    @property
    def store_url(self) -> str:
        """The store's URL."""
        return self.store or default_store(self.home_path)

    @property
    def cache(self) -> "Cache":
        """A new cache of fetched artifacts; what is taken from it is in use until it is closed."""
        # Imported here: most commands fetch nothing.
        from flows.artifacts.cache import Cache

        return Cache(self.home_path / "artifacts", default_cache_limit())

    def open_home(self) -> Path:
        """Create the home directory if needed and return it.

        Raises ConfigError if a file is in its place or it cannot be created.
        """
        with writing(self.home_path, ConfigError, hint="give another directory with --home"):
            # 0700: the home holds passwords of the Prefect server and of its database.
            self.home_path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.home_path

    def open_store(self) -> Store:
        """Return the artifact store. Creates the home directory, where the default store is."""
        self.open_home()
        return open_store(self.store_url)


@as_options
@dataclass(frozen=True, kw_only=True)
class PlacementOptions(StoreOptions):
    """Home, store, devices and every other setting of the placement."""

    gpus: Gpus = None
    place: Place = ()
    device_batch_size: Annotated[
        int | None,
        Parameter(group=WHERE, help="Micro-batch per device; lower it if memory runs out."),
    ] = None
    attention: Annotated[
        Attention | None,
        Parameter(group=WHERE, help="Attention backend; default the best one of the device."),
    ] = None
    compile: Annotated[
        bool | None,
        Parameter(
            negative="--no-compile",
            group=WHERE,
            help="Compile whole passes for a GPU; default by stage.",
        ),
    ] = None

    @property
    def argv(self) -> list[str]:
        """The given options as command line words, for a command that a user may copy."""
        return argv_of(replace(self, place=self.place_settings))

    @property
    def place_settings(self) -> tuple[str, ...]:
        """Every changed setting of the placement, as name=value."""
        # Values are parsed as JSON, where a boolean is `true` and not Python's `True`.
        options = [
            ("device_batch_size", self.device_batch_size),
            ("attention", self.attention),
            ("compile", None if self.compile is None else json.dumps(self.compile)),
        ]
        return (*(f"{name}={value}" for name, value in options if value is not None), *self.place)

    def warn_of(self, placement: Placement) -> None:
        """Print what the placement lacks, now and not after hours of training."""
        wanted = (*placement.resources.sinks, placement.resources.attention)
        for line, remedy in missing_packages(wanted):
            print_warning(f"{line}: {remedy}")
        asked = {"compile=true", "compile=blocks"} & {*self.place_settings}
        if asked and not placement.resources.compile:
            print_warning(
                f"{min(asked)} counts on a GPU only: on this machine's CPU compiled kernels train "
                "no faster and take minutes to make"
            )


@as_options
@dataclass(frozen=True, kw_only=True)
class RunOptions(RunRequest, PlacementOptions):
    """Everything that a run can be given."""


def check_workers(request: "RunRequest | SweepRequest", *, is_here: bool = True) -> None:
    """Raise ConfigError for GPUs or nodes that are not here, and a pool that runs no GPU stages.

    Without `is_here` another machine runs it, whose GPUs are not known.
    """
    if request.pool is None and is_here:
        check_gpus(request.gpus)
    if request.nodes > 1 and request.pool is None:
        raise ConfigError(
            f"--nodes is {request.nodes}, but this command is on one machine",
            hint="name the work pool whose workers run on the others, such as --pool gpu",
        )
    # A wrong pool would otherwise be found only when the first GPU stage is due, hours later.
    if request.pool is not None:
        check_gpu_pool(request.pool)
