"""The profile and the plan that a command's options ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flows.cli.options import PlacementOptions, RedoOptions, RunOptions
from flows.cli.output import print_warning
from flows.identity.manifest import Manifest
from flows.overrides import ChangedSetting, settings_reach
from flows.plan.pinned import open_pinned, sections_of, stages_with
from flows.plan.plan import Plan, make_plan
from flows.plan.upstream import Pins, pin
from flows.profiles import Profile, open_profile
from flows.run_request import Redo
from infra.placement import Placement
from infra.storage.base import Store
from nanochat_core.errors import ConfigError


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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A profile as the command line gave it, and its plan."""

    profile: Profile
    pins: Pins
    store: Store
    placement: Placement
    plan: Plan
    settings: tuple[ChangedSetting, ...]  # that differ from the profile's


def plan_profile(
    name: str,
    what: RunOptions,
    where: PlacementOptions,
    *,
    redo: Redo = RedoOptions(),  # noqa: B008 - frozen
    will_run: bool = False,
) -> Planned:
    """Plan the profile with these options. Raises ConfigError and what `make_plan` raises.

    `will_run` resolves moving upstream names anew, as a run does.
    """
    store = where.open_store()
    pinned = open_pinned(store, what.use, warn=print_warning)
    chosen, pins = pinned_profile(name, what, where.home_path, plan=not will_run, pinned=pinned)
    placement = where.placement(chosen)
    plan = make_plan(
        chosen.run,
        store,
        where.work,
        force=frozenset(redo.force),
        from_stage=redo.from_stage,
        pinned=pinned,
        placement=placement,
        profile=name,
    )
    return Planned(
        profile=chosen,
        pins=pins,
        store=store,
        placement=placement,
        plan=plan,
        settings=settings_reach(
            name, what, [stage for stage in stages_with(pinned) if stage.name not in pinned]
        ),
    )
