"""What a run would do, and why, before it does anything: one line a stage.

Stages are looked at in the table's order. A stage whose inputs all exist has a fingerprint, and
either exists or has to be built. A stage after one that has to be built is provisional: if that one
comes out as it was, this one is still up to date.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flows import lock
from flows.artifacts import find_manifest, newest_manifests
from flows.estimate import Estimate, estimate, remaining
from flows.fingerprint import REPOSITORY, Code, Identity, identify, preimage_of, short
from flows.manifest import Manifest
from flows.reasons import Change, compare, nearest
from flows.stages import STAGES, Stage, stages_to_redo
from infra.placement import Placement
from infra.storage.base import Store
from nanochat_core.config import RunConfig, Tree
from nanochat_core.errors import ConfigError

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
_HISTORY = 5  # artifacts of a stage that are read for its reason and its estimate
_SHOWN_WORDS = 3


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How far an unfinished job came."""

    step: int
    total: int


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What would become of one stage."""

    stage: Stage
    state: State
    identity: Identity | None  # None: it depends on artifacts that do not exist yet
    manifest: Manifest | None  # of an artifact that is up to date, or that is asked to be redone
    reason: str  # "" when up to date
    changes: tuple[Change, ...]  # against the nearest artifact of this stage
    after: tuple[str, ...]  # stages that are to be built first, for reasons of their own
    resume: Resume | None
    estimate: Estimate | None  # of what is left to do

    @property
    def fingerprint(self) -> str | None:
        """64 hex digits, or None as long as an input does not exist."""
        return self.identity.fingerprint if self.identity else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would do."""

    store: str
    stages: tuple[StagePlan, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing to run. 2: something."""
        return 0 if all(item.state == "=" for item in self.stages) else 2

    def of(self, name: str) -> StagePlan:
        """The plan of one stage."""
        return next(item for item in self.stages if item.stage.name == name)

    def to_json(self) -> str:
        """The plan for programs."""
        tree = {
            "store": self.store,
            "exit_code": self.exit_code,
            "stages": [_to_tree(item) for item in self.stages],
        }
        return json.dumps(tree, indent=1)


def make_plan(
    run: RunConfig,
    store: Store,
    work: Path,
    *,
    force: frozenset[str] = frozenset(),
    from_stage: str | None = None,
    placement: Placement | None = None,
    root: Path = REPOSITORY,
) -> Plan:
    """Look at every stage; `work` holds the work directories of this machine.

    `force` names stages to redo; `from_stage` one to redo with everything after it. Without a
    placement there are no estimates. `root` holds the code that would run. Raises ConfigError for a
    stage that is none, StoreError, and ArtifactError for a damaged manifest that would be used.
    """
    wanted = _wanted(force, from_stage)
    code = Code(root, cache=work / "code.json")
    planner = _Planner(run, store, work, placement, code)
    done: dict[str, StagePlan] = {}
    for stage in STAGES:
        done[stage.name] = planner.look_at(stage, done, wanted=stage.name in wanted)
    code.save_cache()
    return Plan(store=store.url, stages=tuple(done.values()))


class _Planner:
    def __init__(
        self, run: RunConfig, store: Store, work: Path, placement: Placement | None, code: Code
    ) -> None:
        self._run = run
        self._store = store
        self._work = work
        self._placement = placement
        self._code = code

    def look_at(self, stage: Stage, done: Mapping[str, StagePlan], *, wanted: bool) -> StagePlan:
        inputs = [done[source.name] for source in stage.inputs]
        digests = {i.stage.name: i.manifest.digest for i in inputs if i.manifest and i.state == "="}
        if len(digests) < len(inputs):
            return self._unsettled(stage, _roots(inputs), wanted=wanted)
        identity = identify(stage, self._run, digests, code=self._code)
        manifest = find_manifest(self._store, stage.name, identity.fingerprint)
        if manifest is None:
            return self._to_build(stage, identity)
        return StagePlan(
            stage=stage,
            state="~" if wanted else "=",
            identity=identity,
            manifest=manifest,
            reason="asked for" if wanted else "",
            changes=(),
            after=(),
            resume=None,
            estimate=self._estimate(stage, [manifest]) if wanted else None,
        )

    def _to_build(self, stage: Stage, identity: Identity) -> StagePlan:
        history, changes = self._history(stage, identity.preimage, with_inputs=True)
        owner = lock.find_owner(lock.lock_path(self._work, stage.name, identity.fingerprint))
        resume = find_resume(lock.work_directory(self._work, stage.name, identity.fingerprint))
        state, reason = _why(history, changes)
        whole = self._estimate(stage, history)
        if resume is not None:
            whole = remaining(whole, step=resume.step, total=resume.total)
            state, reason = ">", f"step {resume.step}/{resume.total}"
        if owner is not None:
            state, reason = "!", f"by {owner}" + (f", {reason}" if resume else "")
        return StagePlan(
            stage=stage,
            state=state,
            identity=identity,
            manifest=None,
            reason=reason,
            changes=tuple(changes),
            after=(),
            resume=resume,
            estimate=whole,
        )

    def _unsettled(self, stage: Stage, after: tuple[str, ...], *, wanted: bool) -> StagePlan:
        preimage = preimage_of(stage, self._run, code=self._code)
        history, changes = self._history(stage, preimage, with_inputs=False)
        state, reason = _why(history, changes)
        if history and not changes:
            state, reason = ("~", "asked for") if wanted else ("?", "")
        first = "" if state == "+" else f"after {_listed(after)}"
        return StagePlan(
            stage=stage,
            state=state,
            identity=None,
            manifest=None,
            reason="; ".join(filter(None, (reason, first))),
            changes=tuple(changes),
            after=after,
            resume=None,
            estimate=self._estimate(stage, history),
        )

    def _history(
        self, stage: Stage, preimage: Mapping[str, Tree], *, with_inputs: bool
    ) -> tuple[list[Manifest], list[Change]]:
        """The stage's last artifacts, the nearest to `preimage` first, and how that one differs."""
        history = list(newest_manifests(self._store, stage.name, _HISTORY))
        closest = nearest(history, preimage, with_inputs=with_inputs)
        if closest is None:
            return [], []
        history.sort(key=lambda manifest: manifest is not closest)
        return history, compare(closest.preimage, preimage, with_inputs=with_inputs)

    def _estimate(self, stage: Stage, history: list[Manifest]) -> Estimate | None:
        if self._placement is None:
            return None
        return estimate(stage, self._run, history, self._placement)


def find_resume(directory: Path) -> Resume | None:
    """The newest whole checkpoint of a job that was stopped, by the COMMIT.json written last."""
    found: list[Resume] = []
    for path in directory.glob("checkpoints/step-*/COMMIT.json"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            found.append(Resume(step=int(tree["step"]), total=int(tree["total"])))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # the job will not use it either
    return max(found, key=lambda resume: resume.step, default=None)


def render(plan: Plan) -> list[str]:
    """The plan for people: one line a stage, an empty one, and a summary."""
    lines: list[str] = []
    for item in plan.stages:
        fingerprint = short(item.fingerprint) if item.fingerprint else ""
        line = f"{item.state} {item.stage.name:<18}  {STATES[item.state]:<11}  {fingerprint:<12}"
        if item.estimate is not None:
            line += f"  {_duration(item.estimate.seconds):>7} ({item.estimate.source})"
        lines.append((line + (f"  {item.reason}" if item.reason else "")).rstrip())
    return [*lines, "", _summary(plan)]


def _summary(plan: Plan) -> str:
    counts = Counter(item.state for item in plan.stages)
    if plan.exit_code == 0:
        return f"nothing to run: {len(plan.stages)} stages up to date"
    words: dict[str, str] = {"+": "to build", "~": "to rebuild", ">": "to resume"} | {
        "!": "being built",
        "?": "provisional",
        "=": "up to date",
    }
    text = ", ".join(f"{counts[state]} {word}" for state, word in words.items() if counts[state])
    known = [item.estimate for item in plan.stages if item.estimate]
    if known:
        seconds, dollars = sum(e.seconds for e in known), sum(e.dollars for e in known)
        unknown = len(plan.stages) - counts["="] - len(known)
        text += f"; about {_duration(seconds)}, ${dollars:.2f}"
        text += f" without {unknown} stages that never ran" if unknown else ""
    return text


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _to_tree(item: StagePlan) -> dict[str, object]:
    return {
        "stage": item.stage.name,
        "state": item.state,
        "meaning": STATES[item.state],
        "fingerprint": item.fingerprint,
        "reason": item.reason,
        "changes": [asdict(change) for change in item.changes],
        "after": list(item.after),
        "resume": asdict(item.resume) if item.resume else None,
        "estimate": asdict(item.estimate) if item.estimate else None,
    }


def _wanted(force: Iterable[str], from_stage: str | None) -> frozenset[str]:
    names = [stage.name for stage in STAGES]
    wanted = set(force) | set([from_stage] if from_stage else ())
    for name in sorted(wanted):
        if name not in names:
            raise ConfigError(f"there is no stage '{name}'", hint=f"one of: {', '.join(names)}")
    return stages_to_redo(STAGES, force=force, from_stage=from_stage)


def _why(history: list[Manifest], changes: list[Change]) -> tuple[State, str]:
    """The state and reason of a stage that no artifact fits."""
    if not history:
        return "+", ""
    return "~", _listed([str(change) for change in changes])


def _listed(words: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(words) - _SHOWN_WORDS
    return ", ".join(words[:_SHOWN_WORDS]) + (f" and {more} more" if more > 0 else "")


def _roots(inputs: Iterable[StagePlan]) -> tuple[str, ...]:
    """The stages that make others wait, through any number of provisional ones."""
    roots: dict[str, None] = {}
    for item in inputs:
        if item.state == "?":
            roots.update(dict.fromkeys(item.after))
        elif item.state != "=":
            roots[item.stage.name] = None
    return tuple(roots)
