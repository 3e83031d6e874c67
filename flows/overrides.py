"""Compare a run's settings with those of its profile, and name the run by what differs."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flows.artifacts.runs import check_name, find_tag
from flows.identity.diff import compare
from flows.identity.fingerprint import canonical_config, single_settings
from flows.profiles import PROFILES, open_profile
from flows.run_request import RunRequest
from flows.stages import REPORT, Stage, stages_to_redo
from infra.storage.base import Store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.section import Tree

_DIGITS = 6  # of a name


@dataclass(frozen=True, kw_only=True)
class ChangedSetting:
    """A setting that differs from the profile's, and the stages whose results it may change."""

    change: str  # sft.num_epochs 1 -> 2
    stages: tuple[str, ...]  # that read it
    after: tuple[str, ...]  # that are made from those

    def __str__(self) -> str:
        more = f" and {len(self.after)} after" if self.after else ""
        return f"{self.change}: changes {', '.join(self.stages)}{more}"


def settings_reach(request: RunRequest, stages: Sequence[Stage]) -> tuple[ChangedSetting, ...]:
    """Return the requested settings that differ from the profile's, and which stages they reach.

    Another depth counts as one setting, although others follow from it. Raises ConfigError like
    `changed_settings`.
    """
    profile, depth = request.profile, request.depth
    if depth is None and not request.overrides:
        return ()
    default, base = _run(profile, None, ()), _run(profile, depth, ())
    run = _run(profile, depth, request.overrides)
    readers: dict[str, list[str]] = {}
    for stage in stages:
        config = [{"config": canonical_config(stage, each)} for each in (default, base, run)]
        found = [str(change) for change in compare(config[1], config[2])]
        if config[0] != config[1]:
            found.insert(0, f"model.depth {default.model.depth} -> {base.model.depth}")
        for change in found:
            readers.setdefault(change, []).append(stage.name)

    def after(names: list[str]) -> Iterator[str]:
        redone = (stages_to_redo(stages, force=(), from_stage=name) for name in names)
        later = set[str]().union(*redone) - set(names)
        return (stage.name for stage in stages if stage.name in later)

    return tuple(
        ChangedSetting(change=change, stages=tuple(names), after=tuple(after(names)))
        for change, names in readers.items()
    )


def changed_settings(request: RunRequest) -> dict[str, Tree]:
    """Return the settings that a request's overrides change, by dotted name, with their new values.

    Raises ConfigError for an unknown profile or setting, or a wrong value.
    """
    runs = (_run(request.profile, request.depth, each) for each in ((), request.overrides))
    before, after = (dict(single_settings(run.tree())) for run in runs)
    return {name: value for name, value in after.items() if value != before[name]}


def default_name(request: RunRequest) -> str:
    """Return the name of a run that was given none; the same settings give the same name.

    The profile's own settings give the profile's name, another depth tiny-d4, other settings or
    pinned artifacts tiny-1a2b3c, a last stage tiny-until-pretrain: an experiment or a part must not
    take the name of the profile's model. Raises ConfigError like `changed_settings`.
    """
    name, depth, use = request.profile, request.depth, request.use
    if name in PROFILES and not (request.overrides or use or request.until or depth is not None):
        return name
    changed = changed_settings(request)
    if changed or use:
        text = json.dumps([changed, sorted(use)], sort_keys=True)
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
    if depth not in (None, PROFILES[request.profile]().run.model.depth):
        name += f"-d{depth}"
    return part_name(name, request.until)


def part_name(name: str, until: str | None) -> str:
    """Return the name of a run until a stage, given that of the whole run."""
    return name if until in (None, REPORT.name) else f"{name}-until-{until}"


def name_of(request: RunRequest) -> str:
    """Return the name of a requested run. Raises ConfigError like `changed_settings`."""
    return request.run_name or default_name(request)


def check_name_of(request: RunRequest) -> str:
    """Return the name of a requested run, like `name_of`.

    Raises ConfigError too if it is no name, or that of another profile.
    """
    name = check_name(name_of(request))
    if name != request.profile and name in PROFILES:
        raise _taken(request.profile, name, "the name of another profile")
    return name


def open_name(store: Store, request: RunRequest) -> str:
    """Return the name of a requested run, like `check_name_of`.

    Raises ConfigError too if it is that of a tag.
    """
    name = check_name_of(request)
    if find_tag(store, name) is not None:  # a tag wins over a run's name
        raise _taken(request.profile, name, "a tag")
    return name


def _taken(profile: str, name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name} is {what}: a run called so could not be found by its name",
        hint=f"give the run another name, such as --name my-{profile}",
    )


def _run(profile: str, depth: int | None, overrides: Sequence[str]) -> RunConfig:
    return open_profile(profile, depth=depth, overrides=overrides, snapshots=False).run
