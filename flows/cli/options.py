"""Options shared by several commands: what is trained (RunOptions) and where (StoreOptions and on).

Each class is a flat group of options on the command line. Its `words` property gives the options
back as text, for the commands that hints suggest.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Group, Parameter

from flows.artifacts.cache import Cache
from flows.build.retry import RETRIES
from flows.cli.output import print_warning
from flows.identity.manifest import Manifest
from flows.plan.pinned import sections_of
from flows.plan.upstream import Pins, pin
from flows.profiles import Profile, make_placement, open_profile
from infra.placement import (
    SETTINGS,
    Placement,
    check_gpu_pool,
    count_gpus,
    default_cache_limit,
    default_home,
    default_store,
    device_for,
)
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.errors import ConfigError
from nanochat_core.job import Attention

_WHAT = Group("What is trained", sort_key=1)
_WHERE = Group("Where (never changes a result)", sort_key=2)

ProfileName: TypeAlias = Annotated[
    str, Parameter(help="Name of a profile; `nanochat profiles` lists them.")
]
ModelName: TypeAlias = Annotated[
    str,
    Parameter(
        help="A profile or a tag (its newest chat model), a stage of one (sft@tiny), a fingerprint "
        "(sft/1a2b3c) or a model directory."
    ),
]
AsJson: TypeAlias = Annotated[
    bool, Parameter(name="--json", negative="", help="Print JSON for programs.")
]


@Parameter(name="*", group=_WHAT)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Changes to a profile."""

    depth: Annotated[
        int | None, Parameter(help="Number of transformer layers; the rest follows from it.")
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative="",
            show_default=False,
            help="Change one setting, as section.name=value; may be repeated.",
        ),
    ] = ()

    uses: Annotated[
        tuple[str, ...],
        Parameter(
            name="--use",
            negative="",
            show_default=False,
            help="Take this artifact for its stage, such as pretrain@other: neither it nor what "
            "only it needs is built; may be repeated. Ends without a report card.",
        ),
    ] = ()

    def command(self, profile: str, *, place: Sequence[str] = ()) -> str:
        """Return the `nanochat run` command of `profile` with these changes and options `place`."""
        words = ["nanochat", "run", profile]
        words += [] if self.depth is None else ["--depth", str(self.depth)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += [word for name in self.uses for word in ("--use", name)]
        return shlex.join([*words, *place])


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The home directory and the artifact store."""

    home: Annotated[
        Path | None,
        Parameter(help="Directory of unfinished work; default NANOCHAT_HOME, ~/.nanochat-flows."),
    ] = None
    store: Annotated[
        str | None,
        Parameter(help="URL of the artifact store; default NANOCHAT_STORE, else HOME/store."),
    ] = None

    @property
    def words(self) -> list[str]:
        """The given options as command line words, for a command that a user may copy."""
        # Only given options: the next command takes defaults from the same environment.
        options = [("--home", self.home), ("--store", self.store)]
        return [word for name, value in options if value for word in (name, str(value))]

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
    def work(self) -> Path:
        """Work directories of jobs."""
        return self.home_path / "work"

    @property
    def cache(self) -> Cache:
        """A new cache of fetched artifacts; what is taken from it is in use until it is closed."""
        return Cache(self.home_path / "artifacts", default_cache_limit())

    def open_home(self) -> Path:
        """Create the home directory if needed and return it.

        Raises ConfigError if a file is in its place or it cannot be created.
        """
        try:
            # 0700: the home holds passwords of the Prefect server and of its database.
            self.home_path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"{self.home_path} cannot be a directory: {error.filename} is a file",
                hint="give another one with --home",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self.home_path} cannot be made: {(error.strerror or str(error)).lower()}",
                hint="give another one with --home",
            ) from error
        return self.home_path

    def open_store(self) -> Store:
        """Return the artifact store. Creates the home directory, where the default store is."""
        self.open_home()
        return open_store(self.store_url)


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class DeviceOptions(StoreOptions):
    """Home, store and the number of GPUs."""

    gpus: Annotated[
        int | None,
        Parameter(help="GPUs to use, 0 for the CPU; default as many as are of use."),
    ] = None

    def device(self) -> str:
        """Return the device that one model runs on: "cuda" or "cpu"."""
        self.check_gpus()
        return device_for(count_gpus() if self.gpus is None else self.gpus)

    def check_gpus(self, *, elsewhere: bool = False) -> None:
        """Raise ConfigError if this machine has fewer GPUs than --gpus.

        elsewhere: the work runs on other machines, whose GPUs cannot be counted from here.
        """
        self._check_sign()
        if not elsewhere and self.gpus is not None and self.gpus > count_gpus():
            raise ConfigError(
                f"--gpus is {self.gpus}, this machine has {count_gpus()}",
                hint="run `nanochat doctor`, or give --gpus 0",
            )

    def _check_sign(self) -> None:
        if self.gpus is not None and self.gpus < 0:
            raise ConfigError(f"--gpus is {self.gpus}", hint="0 is the CPU")


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class PlacementOptions(DeviceOptions):
    """Home, store, devices and every other setting of the placement."""

    device_batch_size: Annotated[
        int | None,
        Parameter(help="Rows per device at a time; fewer need less memory. Default the profile's."),
    ] = None
    attention: Annotated[
        Attention | None, Parameter(help="Attention backend; default the best one the device has.")
    ] = None
    compile: Annotated[
        bool | None, Parameter(help="Let torch.compile make kernels; default on a GPU only.")
    ] = None
    place: Annotated[
        tuple[str, ...],
        Parameter(
            name="--place",
            negative="",
            show_default=False,
            help="Change one setting of the placement, as name=value; may be repeated. Names: "
            f"{', '.join(SETTINGS)}; docs/reference/placement.md says what each does.",
        ),
    ] = ()

    @property
    def words(self) -> list[str]:
        """The given options as command line words, for a command that a user may copy."""
        gpus = [] if self.gpus is None else ["--gpus", str(self.gpus)]
        return [*super().words, *gpus, *(w for s in self.settings for w in ("--place", s))]

    @property
    def settings(self) -> tuple[str, ...]:
        """Every changed setting of the placement, as name=value."""
        # Values are parsed as JSON, where a boolean is `true` and not Python's `True`.
        options = [
            ("device_batch_size", self.device_batch_size),
            ("attention", self.attention),
            ("compile", None if self.compile is None else json.dumps(self.compile)),
        ]
        return (*(f"{name}={value}" for name, value in options if value is not None), *self.place)

    def placement(self, profile: Profile) -> Placement:
        """Return the placement of a run of `profile`: where and how fast it executes."""
        # Only the sign: `plan` may be asked about a machine with more GPUs than this one.
        self._check_sign()
        return make_placement(
            profile.pace,
            home=self.open_home(),
            store=self.store_url,
            gpus=self.gpus,
            settings=self.settings,
        )


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The workers that build the GPU stages of a run, and the number of retries."""

    pool: Annotated[
        str | None,
        Parameter(
            help="Work pool whose workers run the GPU stages, such as gpu; default this command."
        ),
    ] = None
    nodes: Annotated[
        int, Parameter(help="Machines that each GPU stage takes; more than one needs --pool.")
    ] = 1
    retries: Annotated[
        int,
        Parameter(
            help="How often a stage is started again that was lost: its process killed, its "
            "machine taken, the store away. A mistake is never tried again."
        ),
    ] = RETRIES

    @property
    def words(self) -> list[str]:
        """The given options as command line words, for a command that a user may copy."""
        # Defaults are left out, so that a suggested command stays as short as the user's own.
        pool = ["--pool", self.pool] if self.pool else []
        nodes = ["--nodes", str(self.nodes)] if self.nodes != 1 else []
        retries = ["--retries", str(self.retries)] if self.retries != RETRIES else []
        return [*pool, *nodes, *retries]

    def check(self) -> None:
        """Raise ConfigError for invalid numbers, and for a pool that runs no GPU stages."""
        if self.nodes < 1:
            raise ConfigError(f"--nodes is {self.nodes}", hint="at least 1")
        if self.nodes > 1 and self.pool is None:
            raise ConfigError(
                f"--nodes is {self.nodes}, but this command is on one machine",
                hint="name the work pool whose workers run on the others, such as --pool gpu",
            )
        # A wrong pool would otherwise be found only when the first GPU stage is due, hours later.
        if self.pool is not None:
            check_gpu_pool(self.pool)
        if self.retries < 0:
            raise ConfigError(f"--retries is {self.retries}", hint="0 tries each stage once")


def profile_of(name: str, what: RunOptions) -> Profile:
    """Return the requested profile. Raises ConfigError on a wrong name or value."""
    try:
        return open_profile(name, depth=what.depth, overrides=what.overrides)
    except ConfigError as error:
        # Most errors have a hint of their own; for the rest the form of --set helps most.
        if error.hint is None:
            error.hint = "a setting is given like --set pretrain.num_steps=500"
        raise


def pinned_profile(
    name: str,
    what: RunOptions,
    home: Path,
    *,
    plan: bool,
    known: Mapping[str, str] | None = None,
    pinned: Mapping[str, Manifest] | None = None,
) -> tuple[Profile, Pins]:
    """Return the profile with every moving upstream name resolved, and the pin of each name.

    plan: see `flows.plan.upstream.pin`. Names that only `pinned` artifacts need are not looked up.
    """
    chosen = profile_of(name, what)
    sections = sections_of(pinned or {})
    run, pins = pin(chosen.run, home, log=print_warning, known=known, sections=sections, plan=plan)
    return replace(chosen, run=run), pins
