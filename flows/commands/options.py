"""The options that several commands share: what is trained, and where."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Group, Parameter

from flows.profiles import Profile, make_placement, open_profile
from infra.placement import Placement, default_home, default_store
from nanochat_core.errors import ConfigError

_WHAT = Group("What is trained", sort_key=1)
_WHERE = Group("Where (never changes a result)", sort_key=2)

ProfileName: TypeAlias = Annotated[
    str, Parameter(help="Name of a profile; `nanochat profiles` lists them.")
]
AsJson: TypeAlias = Annotated[
    bool, Parameter(name="--json", negative="", help="Print JSON for programs.")
]


@Parameter(name="*", group=_WHAT)
@dataclass(frozen=True, kw_only=True)
class What:
    """Changes to a profile."""

    depth: Annotated[
        int | None, Parameter(help="Number of transformer layers; the rest follows from it.")
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative="",
            help="Change one setting, as section.name=value; may be repeated.",
        ),
    ] = ()


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class Place:
    """The home directory and the artifact store."""

    home: Annotated[
        Path | None,
        Parameter(help="Work directories; default NANOCHAT_HOME, else ~/.nanochat-flows."),
    ] = None
    store: Annotated[
        str | None,
        Parameter(help="URL of the artifact store; default NANOCHAT_STORE, else HOME/store."),
    ] = None

    @property
    def home_directory(self) -> Path:
        """The home directory, absolute. Raises ConfigError when a file is in its place."""
        home = self.home.expanduser().absolute() if self.home else default_home()
        if home.exists() and not home.is_dir():
            raise ConfigError(f"{home} is not a directory", hint="give another one with --home")
        return home

    @property
    def store_url(self) -> str:
        """The store's URL."""
        return self.store or default_store(self.home_directory)


@Parameter(name="*", group=_WHERE)
@dataclass(frozen=True, kw_only=True)
class Where(Place):
    """A place and what computes there."""

    gpus: Annotated[
        int | None,
        Parameter(help="GPUs to use, 0 for the CPU; default all that the profile can fill."),
    ] = None

    def placement(self, profile: Profile) -> Placement:
        """Where and how fast a run of `profile` executes."""
        return make_placement(
            profile.pace, home=self.home_directory, store=self.store_url, gpus=self.gpus
        )


def profile_of(name: str, what: What) -> Profile:
    """The profile a person asked for. Raises ConfigError on a wrong name or value."""
    return open_profile(name, depth=what.depth, overrides=what.overrides)
