"""Read the recipe of a command: from a profile's TOML file, or from the record of a run."""

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flows.artifacts.runs import Run, known_names
from flows.cli.options import NamedOptions, StoreOptions, argv_of
from flows.overrides import name_of
from flows.profiles import PROFILES, is_profile_file
from flows.run_request import NamedRecipe, Recipe, shared
from infra.near import nearest, suggest
from nanochat_core.errors import ConfigError, NanochatError

_Recipe = TypeVar("_Recipe", bound=Recipe)


def read_recipe(
    profile: str, what: _Recipe, place: StoreOptions | None = None
) -> tuple[str, _Recipe]:
    """Return the profile's name and the changes to it: what was given, or the file with it on top.

    Raises ConfigError if `profile` names no profile, or a file that is none. The error says what it
    names instead; a run is looked up in the store of `place`.
    """
    if profile in PROFILES:
        return profile, what
    if not is_profile_file(profile):
        from flows.artifacts.names import check_kind  # most commands are given a profile's name

        check_kind(profile, "profile")
        raise _unknown_profile(profile, place)
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


def _unknown_profile(word: str, place: StoreOptions | None) -> ConfigError:
    """Return the error for a word that names no profile, with the settings of a run called so."""
    from flows.artifacts.names import kind_of, open_newest_run

    names = [*PROFILES]
    with contextlib.suppress(NanochatError):  # the store cannot be reached, or a damaged record
        if place is not None:
            store = place.open_store()
            if kind := kind_of(word, store):
                run = open_newest_run(store, word)
                recipe = shlex.join([run.profile, *argv_of(options_of_run(run))])
                return ConfigError(
                    f"'{word}' is {kind}, not a profile",
                    hint=f"give its profile and settings: {recipe}",
                )
            names += known_names(store) if not nearest(word, names) else []
    hint = suggest(word, names if nearest(word, names) else [*PROFILES])
    return ConfigError(f"there is no profile '{word}'", hint=hint)
