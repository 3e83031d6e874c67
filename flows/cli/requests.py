"""Make and plan the request of a command: of a profile, its TOML file, or a recorded run."""

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.artifacts.names import hint_for, kind_of, open_newest_run
from flows.artifacts.runs import Run
from flows.cli.options import PlacementOptions, RunOptions, StoreOptions, argv_of
from flows.cli.output import print_warning
from flows.overrides import name_of, part_name
from flows.plan.planned import Planned, plan_run
from flows.profiles import PROFILES, is_profile_file
from flows.run_request import RunRequest, absolute_text, shared
from nanochat_core.errors import ConfigError, NanochatError


def read_request(profile: str, where: PlacementOptions, **what: Any) -> RunRequest:
    """Return the run of a profile, or of its TOML file, that a command's options ask for.

    `where` may be `RunOptions`, else `what` has the other fields. Options win over the file. Raises
    ConfigError if `profile` names no profile; the error says what it names instead.
    """
    given: dict[str, Any] = shared(RunRequest, where) | what | {"profile": profile}
    given |= {"store": where.store_url, "place": where.place_settings}
    request = RunRequest(**given)
    if request.data is not None:
        request = replace(request, data=absolute_text(request.data))
    request = request.resolved
    if profile in PROFILES:
        return request
    if not is_profile_file(profile):
        raise _unknown_profile(profile, where)
    # Imported here: most commands are given the name of a profile.
    from flows.profile_file import read_profile_file

    file = read_profile_file(Path(profile), depth=request.depth)
    again = {override.partition("=")[0].strip() for override in request.overrides}
    kept = [override for override in file.overrides if override.partition("=")[0] not in again]
    return replace(
        request,
        profile=file.profile,
        depth=file.depth,
        overrides=(*kept, *request.overrides),
        run_name=request.run_name or (file.run_name and part_name(file.run_name, request.until)),
    )


def plan_request(request: RunRequest, where: PlacementOptions, **options: Any) -> Planned:
    """Plan a request with options of `plan_run`; print warnings. Raises what `plan_run` raises."""
    store, home = where.open_store(), where.home_path
    planned = plan_run(request, store, home, log=print_warning, **options)
    where.warn_of(planned.placement)
    return planned


def run_command(request: RunRequest, where: StoreOptions) -> str:
    """Return the `nanochat run` command of a request, with the options `where`."""
    options = RunOptions(**shared(RunOptions, request, where))
    return shlex.join(["nanochat", "run", request.profile, *options.argv])


def command_of_run(
    run: Run,
    where: StoreOptions = StoreOptions(),
    *,
    use: tuple[str, ...] | None = None,
) -> str:
    """Return the command that makes a recorded run again; of an evaluation, `evals`.

    `use` replaces the names of the artifacts that were given to it.
    """
    from flows.evals.suite import evaluated_model  # few commands show other runs

    if (model := evaluated_model(run)) is not None:
        return shlex.join(["nanochat", "evals", model, *where.argv])
    return run_command(request_of_run(run, use=use), where)


def request_of_run(run: Run, *, use: tuple[str, ...] | None = None) -> RunRequest:
    """Return the request with which a command has the settings and the name of a recorded run.

    `use` replaces the names of the artifacts that were given to it.
    """
    request = RunRequest(
        profile=run.profile,
        depth=run.depth,
        overrides=run.overrides,
        until=run.until,
        use=run.uses if use is None else use,
    )
    try:
        is_default = name_of(request) == run.name
    except ConfigError:  # an imported run, or a setting or profile that was removed
        is_default = False
    return request if is_default else replace(request, run_name=run.name)


def _unknown_profile(word: str, where: StoreOptions) -> ConfigError:
    """Return the error for a word that names no profile, with the settings of a run called so."""
    hint = hint_for(word, "profile")
    if kind_of(word) not in (None, "an artifact"):  # this needs no store, which may not answer
        return ConfigError(f"there is no profile '{word}'", hint=hint)
    with contextlib.suppress(NanochatError):  # the store cannot be reached, or a damaged record
        store = where.open_store()
        hint = hint_for(word, "profile", store)
        if (kind := kind_of(word, store)) in ("an artifact", "a run", "a tag"):
            run = open_newest_run(store, word)
            recipe = shlex.join([run.profile, *argv_of(request_of_run(run))])
            hint = f"{word} is {kind}; give its profile and settings: {recipe}"
    return ConfigError(f"there is no profile '{word}'", hint=hint)
