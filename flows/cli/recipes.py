"""Read the recipe of a command: from a profile's TOML file, or from the record of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flows.artifacts.runs import Run
from flows.cli.options import NamedOptions
from flows.overrides import name_of
from flows.profiles import is_profile_file
from flows.run_request import NamedRecipe, Recipe, shared
from nanochat_core.errors import ConfigError

_Recipe = TypeVar("_Recipe", bound=Recipe)


def read_recipe(profile: str, what: _Recipe) -> tuple[str, _Recipe]:
    """Return the profile's name and the changes to it: what was given, or the file with it on top.

    Raises ConfigError if `profile` is a file that is no profile.
    """
    if not is_profile_file(profile):
        return profile, what
    # Imported here: most commands are given the name of a profile.
    from flows.profile_file import read_profile_file

    file = read_profile_file(Path(profile), depth=what.depth)
    again = {override.partition("=")[0].strip() for override in what.overrides}
    kept = [override for override in file.overrides if override.partition("=")[0] not in again]
    changes: dict[str, Any] = {"depth": file.depth, "overrides": (*kept, *what.overrides)}
    if isinstance(what, NamedRecipe) and what.run_name is None:
        changes["run_name"] = file.run_name
    return file.profile, replace(what, **changes)


def options_of_run(run: Run, *, use: tuple[str, ...] | None = None) -> NamedOptions:
    """Return the options with which a command has the settings and the name of a recorded run.

    `use` replaces the names of the artifacts that were given to it.
    """
    # Before the name: the default one follows from these words.
    what = NamedOptions(**shared(NamedOptions, run), use=run.uses if use is None else use)
    try:
        is_default = name_of(run.profile, what) == run.name
    except ConfigError:  # an imported run, or a setting or profile that was removed
        is_default = False
    return what if is_default else replace(what, run_name=run.name)
