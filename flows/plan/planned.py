"""Plan what a `RunRequest` asks for: its settings, given artifacts, placement and stages."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flows.identity.manifest import Manifest
from flows.overrides import ChangedSetting, open_name, settings_reach
from flows.plan.pinned import check_trained, open_pinned, sections_of, stages_with
from flows.plan.plan import Plan, make_plan
from flows.plan.upstream import Log, Pins, pin
from flows.profiles import Profile, make_placement, open_profile
from flows.run_request import RunRequest
from flows.stages import Stage
from infra.placement import Placement
from infra.storage.base import Store
from nanochat_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A requested run, opened and planned."""

    request: RunRequest
    profile: Profile  # its moving upstream names are resolved
    pins: Pins  # what they stand for
    store: Store
    placement: Placement
    pinned: Mapping[str, Manifest]  # artifacts given with --use, by stage
    plan: Plan

    @functools.cached_property
    def name(self) -> str:
        """The name of the run. Raises ConfigError if it cannot have it: see `open_name`."""
        return open_name(self.store, self.request)

    @property
    def settings(self) -> tuple[ChangedSetting, ...]:
        """The settings that differ from the profile's and change a stage of the run."""
        stages = (item.stage for item in self.plan.stages)
        return settings_reach(self.request, [s for s in stages if s.name not in self.pinned])


def plan_run(
    request: RunRequest,
    store: Store,
    home: Path,
    *,
    log: Log,
    known: Mapping[str, str] | None = None,
    only: Stage | None = None,
    will_run: bool = True,
) -> Planned:
    """Open and plan a run. `known` are upstream names that are resolved already.

    Args:
        request: With short fields resolved: see `RunRequest.resolved`.
        store: The artifact store of the run.
        home: Directory of work and history on this machine.
        log: Receives warnings.
        only: The stage to build; None means all.
        will_run: Resolve moving upstream names again; a plan alone may use a recent answer.

    Raises ConfigError for a wrong name, setting or placement, and what `make_plan` raises.
    """
    opened = open_settings(request)
    pinned = open_pinned(store, request.use, warn=log)
    check_trained([only] if only else stages_with(pinned, until=request.until), pinned)
    sections = sections_of(pinned, until=request.until)
    run, pins = pin(opened.run, home, log=log, known=known, sections=sections, plan=not will_run)
    placement = make_placement(
        opened.pace, home=home, store=store.url, gpus=request.gpus, settings=request.place
    )
    return Planned(
        request=request,
        profile=replace(opened, run=run),
        pins=pins,
        store=store,
        placement=replace(placement, nodes=request.nodes, pool=request.pool),
        pinned=pinned,
        plan=make_plan(
            run,
            store,
            home / "work",
            force=frozenset(request.force),
            from_stage=request.from_stage,
            until=request.until,
            pinned=pinned,
            placement=placement,
            profile=request.profile,
        ),
    )


def open_settings(request: RunRequest) -> Profile:
    """Return the profile with the requested settings. Raises ConfigError."""
    try:
        return open_profile(request.profile, depth=request.depth, overrides=request.overrides)
    except ConfigError as error:
        # Most errors have a hint of their own; for the rest the form of --set helps most.
        error.hint = error.hint or "a setting is given like --set pretrain.num_steps=500"
        raise
