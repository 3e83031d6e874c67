"""A repository, a store and a work directory for plans; each stage is one line of code."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.artifacts.publish import publish
from flows.artifacts.runs import Run, new_run
from flows.identity.fingerprint import Code
from flows.identity.manifest import Manifest, identify_from
from flows.identity.work import measure_work
from flows.plan.plan import Plan, make_plan
from flows.stages import STAGES
from infra.placement import Placement
from infra.storage.local import LocalStore
from nanochat_core import scaling
from nanochat_core.config import RunConfig
from nanochat_core.job import Resources
from tests.support.flows.rows import PROVENANCE

RUN = scaling.run_for_depth(4)
NAMES = [stage.name for stage in STAGES]
PLACEMENT = Placement(
    home=Path("/home"),
    store="file:///store",
    gpus=0,
    resources=Resources(
        device="cpu",
        threads=2,
        device_batch_size=1,
        save_every_seconds=60.0,
        eval_every_steps=10,
        dollars_per_hour=3.6,
    ),
)


def on_gpus(count: int, **changes: Any) -> Placement:
    """The same place with GPUs, and changed resources."""
    resources = dataclasses.replace(PLACEMENT.resources, device="cuda", **changes)
    return dataclasses.replace(PLACEMENT, gpus=count, resources=resources)


def write_code(root: Path) -> Path:
    """A repository in which every stage's entry module imports `shared` and nothing else."""
    for stage in STAGES:
        path = root / f"{stage.entry.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import nanochat_core.shared\nNAME = '{stage.entry}'\n")
    (root / "nanochat_core" / "shared.py").write_text("SHARED = 1\n")
    return root


def build(
    store: LocalStore,
    work: Path,
    code: Code,
    *,
    run: RunConfig = RUN,
    until: str | None = None,
    content: Callable[[str], str] = lambda fingerprint: fingerprint,
    commit: str | None = None,
    created: str = PROVENANCE.created,
) -> dict[str, Manifest]:
    """Publish every stage, or those up to `until`, each of 100 s. Contents follow fingerprints."""
    built: dict[str, Manifest] = {}
    for stage in STAGES:
        inputs = {source.name: built[source.name] for source in stage.inputs}
        identity = identify_from(stage, run, inputs, code=code)
        output = work / "output" / stage.name
        output.mkdir(parents=True, exist_ok=True)
        (output / "data").write_text(content(identity.fingerprint))
        if stage.name.startswith("chat_eval"):
            (output / "scores.json").write_text("{}")
        provenance = dataclasses.replace(
            PROVENANCE,
            git_commit=commit,
            created=created,
            metrics={},
            segments=({"started": 0.0, "ended": 100.0, "device": "cpu", "processes": 1},),
            work=measure_work(stage, run),
        )
        built[stage.name] = publish(
            store,
            identity,
            output,
            logs=[],
            inputs=inputs,
            provenance=provenance,
            check_lease=lambda: None,
        ).manifest
        if stage.name == until:
            break
    return built


@dataclasses.dataclass(frozen=True)
class House:
    """A repository, a store and a work directory."""

    root: Path
    store: LocalStore
    work: Path

    def plan(self, run: RunConfig = RUN, **options: Any) -> Plan:
        return make_plan(run, self.store, self.work, root=self.root, **options)

    def build(self, **options: Any) -> dict[str, Manifest]:
        return build(self.store, self.work, Code(self.root), **options)


def make_house(directory: Path) -> House:
    return House(
        write_code(directory / "root"), LocalStore(directory / "store"), directory / "work"
    )


def states(plan: Plan) -> str:
    return "".join(item.state for item in plan.stages)


def after(names: set[str]) -> set[str]:
    """These stages and all that depend on them."""
    for stage in STAGES:
        if names & {source.name for source in stage.inputs}:
            names = names | {stage.name}
    return names


def without(plan: Plan, state: str) -> set[str]:
    return {item.stage.name for item in plan.stages if item.state != state}


def make_run(run_id: str) -> Run:
    """The record of a run that starts."""
    run = new_run(run_id, "toy", profile="tiny")
    return dataclasses.replace(run, started="2026-11-21T00:00:00Z")
