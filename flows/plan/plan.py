"""Plan a run: which stages are up to date, which have to be built, and why.

A stage whose inputs all exist has a fingerprint, and its artifact exists or has to be built. A
stage after one that has to be built is provisional: if that one produces the same bytes as before,
this one is still up to date. Records are read ahead, many at a time (reads.py), so that a distant
store costs a few round trips in a row, not one for each request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flows.artifacts.names import check_stage
from flows.artifacts.revocations import Revoked, find_revoked
from flows.identity.diff import PASSED_ON, Change, compare, nearest
from flows.identity.fingerprint import REPOSITORY, Code, Identity, preimage_of
from flows.identity.manifest import Manifest, identify_from
from flows.identity.ref import ArtifactRef
from flows.leases.lease import find_holder
from flows.plan.estimate import Estimate, estimate, remaining
from flows.plan.pinned import check_stages, stages_with
from flows.plan.reads import PlanReads, Resume, find_resume
from flows.render.text import listed
from flows.stages import STAGES, Stage, stages_to_redo
from infra.placement import Placement
from infra.storage.base import Store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.section import Tree

State: TypeAlias = Literal["=", "+", "~", ">", "!", "?", "x"]
STATES: dict[State, str] = {
    "=": "up to date",
    "+": "never built",
    "~": "rebuild",
    ">": "resume",
    "!": "being built",
    "?": "provisional",
    "x": "revoked",
}
_SHOWN = 3  # words of a reason


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The plan of one stage: its state, the reason, and an estimate."""

    stage: Stage
    state: State
    identity: Identity | None = None  # None: it depends on artifacts that do not exist yet
    # The artifact that is up to date, to be redone, being rebuilt, or revoked; or, if provisional,
    # the one that will be up to date if its inputs are rebuilt with the same contents.
    manifest: Manifest | None = None
    reason: str = ""  # "" when up to date
    changes: tuple[Change, ...] = ()  # against the nearest artifact of this stage
    after: tuple[str, ...] = ()  # stages that have to be built first, for reasons of their own
    revoked: Revoked | None = None  # this very artifact
    revoked_ancestors: tuple[Revoked, ...] = ()  # upstream of `manifest`
    builder: str | None = None  # the process that is building it
    resume: Resume | None = None
    estimate: Estimate | None = None  # of what is left to do

    @property
    def ref(self) -> ArtifactRef | None:
        """Return the artifact. None means an input does not exist yet."""
        if self.identity is None:
            return self.manifest.ref if self.state == "=" and self.manifest else None
        return self.identity.ref

    @property
    def fingerprint(self) -> str | None:
        """Return 64 hex digits. None means an input does not exist yet."""
        return self.ref.fingerprint if self.ref else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plans of all stages of a run."""

    store: str
    stages: tuple[StagePlan, ...]
    unread: tuple[str, ...] = ()  # errors of earlier artifacts, which some reasons may lack

    @property
    def up_to_date(self) -> bool:
        """Return True if there is nothing to run."""
        return all(item.state == "=" for item in self.stages)

    def of(self, name: str) -> StagePlan:
        """Return the plan of one stage. Raises ConfigError if the run does not have it."""
        for item in self.stages:
            if item.stage.name == name:
                return item
        raise ConfigError(
            f"stage {name} is not part of this run",
            hint="--until ends a run at a stage; --use begins it at artifacts, without a report",
        )


def make_plan(
    run: RunConfig,
    store: Store,
    work: Path,
    *,
    force: frozenset[str] = frozenset(),
    from_stage: str | None = None,
    until: str | None = None,
    pinned: Mapping[str, Manifest] | None = None,
    placement: Placement | None = None,
    profile: str | None = None,
    root: Path = REPOSITORY,
) -> Plan:
    """Plan every stage of a run; `work` holds the work directories of this machine.

    `pinned` are inputs named with --use, and `until` is the last stage (flows/plan/pinned.py).
    `force` names stages to redo; `from_stage` one to redo with everything after it. Reasons compare
    with what runs of `profile` made, or without one with any artifact. `root` holds the code to
    run. Without a placement there are no estimates. Raises ConfigError for an unknown stage,
    StoreError, and ArtifactError for a damaged record that would be used.
    """
    pinned = pinned or {}
    stages = stages_with(pinned, until=until)
    wanted = _wanted(stages, pinned, force, from_stage)
    done = {
        stage.name: StagePlan(stage=stage, state="=", manifest=pinned[stage.name], reason="given")
        for stage in stages
        if stage.name in pinned
    }
    code = Code(root, cache=work / "code.json")
    reads = PlanReads(store, profile)
    planner = _Planner(run, store, work, placement, code, reads)
    for stage in stages:  # inputs first
        if stage.name not in done:
            done[stage.name] = planner.look_at(stage, done=done, wanted=wanted)
    code.save_cache()
    plans = tuple(done[stage.name] for stage in stages)
    return Plan(store=store.url, stages=plans, unread=tuple(reads.unread))


@dataclass(frozen=True)
class _Planner:
    """A planner of single stages."""

    _run: RunConfig
    _store: Store
    _work: Path
    _placement: Placement | None
    _code: Code
    _reads: PlanReads

    def look_at(
        self, stage: Stage, *, done: Mapping[str, StagePlan], wanted: frozenset[str]
    ) -> StagePlan:
        """Return the plan of `stage`; those of its inputs are in `done`."""
        inputs = [done[source.name] for source in stage.inputs]
        made = {item.stage.name: item.manifest for item in inputs if item.manifest}
        is_wanted = stage.name in wanted
        if any(item.state != "=" for item in inputs):
            return self._after(stage, inputs, made, is_wanted=is_wanted)
        identity = self._identify(stage, made)
        manifest, revoked = self._find(identity)
        if manifest is None:
            return self._to_build(stage, identity, is_wanted=is_wanted)
        reason, builder = "asked for" if is_wanted else "", None
        state: State = "~" if is_wanted else "="
        if revoked is not None:
            builder = self._find_builder(identity)
            state, reason = "x", _why_revoked(revoked, identity.ref)
            if builder is not None:
                state, reason = "!", _joined(f"by {builder}", reason)
        return StagePlan(
            stage=stage,
            state=state,
            identity=identity,
            manifest=manifest,
            reason=reason,
            revoked=revoked,
            builder=builder,
            estimate=self._estimate(stage, [manifest]) if state != "=" else None,
        )

    def _identify(self, stage: Stage, made: Mapping[str, Manifest]) -> Identity:
        """Return the identity of the artifact to use or to build, made from these inputs."""
        recipe = identify_from(stage, self._run, made, code=self._code)
        identity = recipe.redone(self._reads.redo_of(recipe.ref).number)
        if self._reads.find(identity.ref) is None and self._reads.find_revocation(identity.ref):
            # A run would ask for the next one: see `_choose` in flows/building/build.py.
            return identity.redone(identity.redo + 1)
        return identity

    def _find(self, identity: Identity) -> tuple[Manifest | None, Revoked | None]:
        """Return an artifact and its revocation; None for each that does not exist."""
        ref = identity.ref
        manifest = self._reads.find(ref)
        if manifest is None:
            # A missing stage needs its newest artifacts next, as all stages after it do.
            later = stages_to_redo(STAGES, force=(), from_stage=ref.stage)
            self._reads.read_newest(s.name for s in STAGES if s.name in later)
            return None, None
        if (revocation := self._reads.find_revocation(ref)) is not None:
            return manifest, Revoked(ref=ref, revocation=revocation)
        # Only an accepted artifact can be revoked by way of another one, whose files it shares.
        return manifest, find_revoked(self._store, manifest) if manifest.accepted else None

    def _to_build(self, stage: Stage, identity: Identity, *, is_wanted: bool) -> StagePlan:
        history, changes = self._history(stage, identity.preimage, with_inputs=True)
        builder = self._find_builder(identity)
        # One that is asked for starts at step 0.
        resume = None if is_wanted else find_resume(self._store, self._work, identity)
        # The one before stands for it in the plans of the stages that follow.
        number = self._reads.redo_of(identity.redone(0).ref).before
        before = self._reads.find(identity.redone(number).ref) if identity.redo > number else None
        state, reason = _why(changes) if before is None else ("~", "rebuild has begun")
        whole = self._estimate(stage, history)
        if resume is not None:
            whole = remaining(whole, step=resume.step, total=resume.total)
            state, reason = ">", str(resume)
        if builder is not None:
            state, reason = "!", _joined(f"by {builder}", str(resume or ""))
        return StagePlan(
            stage=stage,
            state=state,
            identity=identity,
            manifest=before,
            reason=reason,
            changes=tuple(changes or ()),
            builder=builder,
            resume=resume,
            estimate=whole,
        )

    def _find_builder(self, identity: Identity) -> str | None:
        return str(found) if (found := find_holder(self._store, identity.ref)) else None

    def _after(
        self,
        stage: Stage,
        inputs: Sequence[StagePlan],
        made: Mapping[str, Manifest],
        *,
        is_wanted: bool,
    ) -> StagePlan:
        """Return the plan of a stage after others that have to be built first."""
        if len(made) == len(inputs):
            manifest, revoked = self._find(self._identify(stage, made))
            if manifest is not None:
                return self._provisional(stage, manifest, revoked, inputs, is_wanted=is_wanted)
        after = _roots(inputs)
        preimage = preimage_of(stage, self._run, code=self._code)
        history, changes = self._history(stage, preimage, with_inputs=False)
        state, reason = _why(changes)
        if changes == []:
            state, reason = ("~", "asked for") if is_wanted else ("?", "")
        return StagePlan(
            stage=stage,
            state=state,
            reason="" if state == "+" else _joined(reason, f"after {listed(after, _SHOWN)}"),
            changes=tuple(changes or ()),
            after=after,
            estimate=self._estimate(stage, history),
        )

    def _provisional(
        self,
        stage: Stage,
        manifest: Manifest,
        revoked: Revoked | None,
        inputs: Sequence[StagePlan],
        *,
        is_wanted: bool,
    ) -> StagePlan:
        """Return the plan of a stage whose artifact exists, but whose inputs are rebuilt first."""
        after = _roots(inputs)
        ancestors = _revoked_among(inputs)
        others = [name for name in after if name not in {found.ref.stage for found in ancestors}]
        state: State = "x" if revoked else "~" if is_wanted else "?"
        reason = _joined(
            _why_revoked(revoked, manifest.ref) if revoked else "",
            "asked for" if is_wanted and not revoked else "",
            f"made from revoked {listed([r.ref.name for r in ancestors], _SHOWN)}"
            if ancestors
            else "",
            f"after {listed(others, _SHOWN)}" if others else "",
        )
        return StagePlan(
            stage=stage,
            state=state,
            manifest=manifest,
            reason=reason,
            after=after,
            revoked=revoked,
            revoked_ancestors=ancestors,
            estimate=self._estimate(stage, [manifest]),
        )

    def _history(
        self, stage: Stage, preimage: Mapping[str, Tree], *, with_inputs: bool
    ) -> tuple[list[Manifest], list[Change] | None]:
        """Return builds, and the changes since the profile's nearest one; None: it has none."""
        own, builds = self._reads.history(stage.name)
        if (closest := nearest(own, preimage, with_inputs=with_inputs)) is None:
            return builds, None
        changes = compare(closest.preimage, preimage, with_inputs=with_inputs)
        # Without inputs the number is not known, as the counter is of a fingerprint.
        return builds, [change for change in changes if with_inputs or change.kind != "redo"]

    def _estimate(self, stage: Stage, history: list[Manifest]) -> Estimate | None:
        if self._placement is None:
            return None
        return estimate(stage, self._run, history, self._placement)


def _wanted(
    stages: Sequence[Stage],
    pinned: Mapping[str, Manifest],
    force: Iterable[str],
    from_stage: str | None,
) -> frozenset[str]:
    wanted = set(force) | set([from_stage] if from_stage else ())
    for name in sorted(wanted):
        check_stage(name)
    check_stages(stages, pinned, wanted)
    return stages_to_redo(stages, force=force, from_stage=from_stage)


def _why(changes: list[Change] | None) -> tuple[State, str]:
    """Return state and reason of a stage to build: its own changes, then those of its inputs."""
    if changes is None:
        return "+", ""
    own = [str(change) for change in changes if change.kind not in PASSED_ON]
    passed_on = [str(change) for change in changes if change.kind in PASSED_ON]
    return "~", _joined(listed(own, _SHOWN), listed(passed_on, _SHOWN))


def _why_revoked(revoked: Revoked, ref: ArtifactRef) -> str:
    why = f"revoked {revoked.revocation.when}: {revoked.revocation.why}"
    return why if revoked.ref == ref else f"the same as {revoked.ref.name}, {why}"


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _roots(inputs: Iterable[StagePlan]) -> tuple[str, ...]:
    """Return the stages to build first, looking through provisional stages."""
    roots: dict[str, None] = {}  # a set that remembers its order, so that reasons are stable
    for item in inputs:
        if item.state == "?":
            roots.update(dict.fromkeys(item.after))
        elif item.state != "=":
            roots[item.stage.name] = None
    return tuple(roots)


def _revoked_among(inputs: Iterable[StagePlan]) -> tuple[Revoked, ...]:
    """Return the revoked artifacts among these inputs and upstream of them."""
    found: dict[str, Revoked] = {}
    for item in inputs:
        for revoked in (*item.revoked_ancestors, *([item.revoked] if item.revoked else ())):
            found[revoked.ref.stage] = revoked
    return tuple(found.values())
