"""The plan: what is up to date, what would be built, and which change is to blame."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import lease
from flows.artifacts import publish, supersede
from flows.fingerprint import Code, identify
from flows.manifest import Manifest, Provenance
from flows.plan import Plan, Resume, make_plan, render
from flows.stages import STAGES
from infra.placement import Placement
from infra.storage.local import LocalStore
from nanochat_core import scaling
from nanochat_core.config import RunConfig, Section
from nanochat_core.errors import ArtifactError, ConfigError, StoreError

RUN = scaling.run_for_depth(4)
NAMES = [stage.name for stage in STAGES]
PLACEMENT = Placement(
    home=Path("/home"),
    store="file:///store",
    gpus=0,
    threads=2,
    device_batch_size=1,
    save_every_seconds=60.0,
    eval_every_steps=10,
    dollars_per_hour=3.6,
)


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
    until: str = "report",
    content: Callable[[str], str] = lambda fingerprint: fingerprint,
) -> dict[str, Manifest]:
    """Publish every stage up to `until`; each took 100 s. Contents follow fingerprints."""
    built: dict[str, Manifest] = {}
    for stage in STAGES:
        inputs = {source.name: built[source.name] for source in stage.inputs}
        identity = identify(stage, run, {n: m.digest for n, m in inputs.items()}, code=code)
        output = work / "output" / stage.name
        output.mkdir(parents=True, exist_ok=True)
        (output / "data").write_text(content(identity.fingerprint))
        provenance = Provenance(
            run="tiny-1",
            created="2026-11-21T05:53:38Z",
            git_commit=None,
            metrics={},
            segments=({"started": 0.0, "ended": 100.0, "device": "cpu", "processes": 1},),
        )
        built[stage.name] = publish(
            store, identity, output, logs=[], inputs=inputs, provenance=provenance
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


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


@pytest.fixture
def full_house(built: House, tmp_path: Path) -> House:
    """A house of one's own with every stage built."""
    house = make_house(tmp_path)
    shutil.copytree(built.root.parent / "store", tmp_path / "store")
    return house


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A house with every stage built. Tests only look at it."""
    house = make_house(tmp_path_factory.mktemp("built"))
    house.build()
    return house


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


def test_nothing_was_ever_built(house: House):
    plan = house.plan()
    assert states(plan) == "+" * len(STAGES)
    assert plan.exit_code == 2
    assert plan.of("shards").fingerprint is not None
    assert plan.of("pretrain").fingerprint is None
    assert plan.of("pretrain").reason == ""
    assert plan.of("pretrain").after == ("rows", "tokenizer")


def test_all_is_up_to_date(built: House):
    plan = built.plan()
    assert states(plan) == "=" * len(STAGES)
    assert plan.exit_code == 0
    assert all(item.manifest and item.fingerprint and not item.reason for item in plan.stages)
    assert render(plan)[-1] == f"nothing to run: {len(STAGES)} stages up to date"


# What changes identity, and what does not.


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every plain value in a config, through sections and tuples of sections."""
    if isinstance(value, Section):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple) and value and isinstance(value[0], Section):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def other(value: Any) -> Any:
    if isinstance(value, str | tuple):
        return value + value[:1] if value else ("x",)
    return "x" if value is None else value + 1


def changed(value: Any, path: tuple[str | int, ...]) -> Any:
    """A copy with one leaf changed, past the checks: what is tested is identity, not sense."""
    if not path:
        return other(value)
    name, *rest = path
    if isinstance(value, tuple):
        return tuple(changed(v, tuple(rest)) if i == name else v for i, v in enumerate(value))
    copy = object.__new__(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        new = changed(item, tuple(rest)) if field.name == name else item
        object.__setattr__(copy, field.name, new)
    return copy


@pytest.mark.parametrize("path", list(leaves(RUN)), ids=lambda p: ".".join(map(str, p)))
def test_a_setting_changes_exactly_the_stages_that_declare_it_and_those_after(
    built: House, path: tuple[str | int, ...]
):
    plan = built.plan(changed(RUN, path))
    declaring = {stage.name for stage in STAGES if path[0] in stage.config}
    assert declaring
    assert without(plan, "=") == after(declaring)
    assert {item.stage.name for item in plan.stages if item.changes} == declaring
    for item in plan.stages:
        if item.stage.name in declaring:
            assert item.state == "~"
            assert 1 <= len(item.changes) <= 2  # a task of another name is one less and one more
            assert all(change.name.startswith(str(path[0])) for change in item.changes)
        elif item.state != "=":
            assert item.state == "?"
            assert set(item.after) <= declaring


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Placement)])
def test_where_it_runs_never_changes_what_it_is(built: House, field: str):
    value = getattr(PLACEMENT, field)
    new = Path("/elsewhere") if isinstance(value, Path) else other(value)
    placement = dataclasses.replace(PLACEMENT, **{field: new})
    plan = built.plan(placement=placement)
    assert states(plan) == "=" * len(STAGES)
    assert [i.fingerprint for i in plan.stages] == [i.fingerprint for i in built.plan().stages]


def test_a_copy_of_the_store_elsewhere_has_the_same_artifacts(built: House, full_house: House):
    assert full_house.plan().exit_code == 0
    assert full_house.plan().store != built.plan().store


def test_a_comment_rebuilds_nothing(full_house: House):
    path = full_house.root / "nanochat_core" / "shared.py"
    path.write_text(f'"""Said."""\n\n{path.read_text()}  # and why\n')
    assert full_house.plan().exit_code == 0


def test_a_change_of_code_rebuilds_the_stages_that_reach_it(full_house: House):
    path = full_house.root / "nanochat_core" / "train" / "sft.py"
    path.write_text(path.read_text() + "LIMIT = 2\n")
    plan = full_house.plan()
    assert without(plan, "=") == after({"sft"})
    assert plan.of("sft").reason == "code nanochat_core.train.sft changed"
    assert plan.of("rl").reason == "after sft"
    path.with_name("midtrain.py").unlink()
    path.with_name("sft.py").write_text(path.read_text() + "import nanochat_core.more\n")
    path.parent.with_name("more.py").write_text("")
    path.with_name("midtrain.py").write_text("NAME = 1\n")
    assert "code nanochat_core.more added" in full_house.plan().of("sft").reason
    assert "code nanochat_core.shared removed" in full_house.plan().of("midtrain").reason


# Early cutoff.


def test_a_stage_rebuilt_with_the_same_bytes_stops_the_wave(house: House):
    house.build(content=lambda fingerprint: "same")
    path = house.root / "nanochat_core" / "train" / "tokenizer.py"
    path.write_text(path.read_text() + "REFACTORED = 1\n")
    plan = house.plan()
    assert without(plan, "=") == after({"tokenizer"})
    assert states(plan).count("~") == 1
    house.build(until="tokenizer", content=lambda fingerprint: "same")
    assert house.plan().exit_code == 0


def test_a_stage_rebuilt_with_other_bytes_moves_it_on(full_house: House):
    path = full_house.root / "nanochat_core" / "train" / "tokenizer.py"
    path.write_text(path.read_text() + "CHANGED = 1\n")
    full_house.build(until="tokenizer")
    plan = full_house.plan()
    assert plan.of("tokenizer").state == "="
    assert plan.of("tokens").state == "~"
    assert plan.of("tokens").reason == "input tokenizer changed"
    assert plan.of("rows").state == "?"


# Reasons.


def test_the_reason_names_settings_with_both_values(built: House):
    run = dataclasses.replace(
        RUN,
        pretrain=dataclasses.replace(RUN.pretrain, num_steps=7),
        sft=dataclasses.replace(RUN.sft, mixture=RUN.sft.mixture[:2]),
    )
    plan = built.plan(run)
    old = RUN.pretrain.num_steps
    assert plan.of("pretrain").reason == f"pretrain.num_steps {old} -> 7"
    sft = plan.of("sft")
    assert sft.state == "~"
    assert sft.reason == "sft.mixture[arithmetic] removed; after pretrain"
    assert plan.of("midtrain").reason == "after pretrain"
    assert plan.of("chat_eval_rl").after == ("sft",)


def test_a_reason_is_against_the_nearest_artifact(house: House):
    far = scaling.run_for_depth(8)
    house.build(run=far, until="pretrain")
    house.build(until="pretrain")
    near = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=7))
    assert house.plan(near).of("pretrain").reason.startswith("pretrain.num_steps")
    near = dataclasses.replace(far, pretrain=dataclasses.replace(far.pretrain, num_steps=7))
    assert len(house.plan(near).of("pretrain").changes) == 1


# Work in progress.


def checkpoint(house: House, stage: str, step: int, *, total: int, text: str | None = None) -> Path:
    fingerprint = house.plan().of(stage).fingerprint
    assert fingerprint
    directory = lease.work_directory(house.work, stage, fingerprint) / "checkpoints"
    directory = directory / f"step-{step:07d}"
    directory.mkdir(parents=True)
    content = json.dumps({"step": step, "total": total}) if text is None else text
    (directory / "COMMIT.json").write_text(content)
    return directory


def test_an_unfinished_job_is_resumed_at_its_newest_whole_checkpoint(house: House):
    house.build(until="rows")
    for step in (9, 100, 20):
        checkpoint(house, "pretrain", step, total=400)
    checkpoint(house, "pretrain", 300, total=400, text='{"step": 3')
    item = house.plan(placement=PLACEMENT).of("pretrain")
    assert item.state == ">"
    assert item.resume == Resume(step=100, total=400)
    assert item.reason == "step 100/400"


def test_what_is_being_built_says_by_whom(house: House):
    house.build(until="rows")
    fingerprint = house.plan().of("pretrain").fingerprint
    assert fingerprint
    path = lease.lock_path(house.work, "pretrain", fingerprint)
    with lease.hold(path, lambda owner: None):
        item = house.plan().of("pretrain")
        assert item.state == "!"
        assert item.reason.startswith("by process ")
        checkpoint(house, "pretrain", 5, total=10)
        assert house.plan().of("pretrain").reason.endswith("step 5/10")
        assert house.plan().of("base_eval").after == ("pretrain",)
    assert house.plan().of("pretrain").state == ">"


# Asked for.


def test_force_redoes_one_stage_and_leaves_the_rest_to_its_outcome(built: House):
    plan = built.plan(force=frozenset({"sft"}))
    assert plan.of("sft").state == "~"
    assert plan.of("sft").reason == "asked for"
    assert plan.of("sft").manifest is not None
    assert plan.of("rl").state == "?"
    assert without(plan, "=") == after({"sft"})


def test_from_stage_redoes_everything_after_it(built: House):
    plan = built.plan(from_stage="sft")
    assert without(plan, "=") == after({"sft"})
    assert {item.state for item in plan.stages} == {"=", "~"}
    assert plan.of("rl").reason == "asked for; after sft"


@pytest.mark.parametrize("options", [{"force": frozenset({"stf"})}, {"from_stage": "stf"}])
def test_a_stage_that_is_none_is_refused(built: House, options: dict[str, Any]):
    with pytest.raises(ConfigError, match="there is no stage 'stf'") as caught:
        built.plan(**options)
    assert "sft" in (caught.value.hint or "")


def test_a_superseded_artifact_is_to_be_built_again(full_house: House):
    fingerprint = full_house.plan().of("sft").fingerprint
    assert fingerprint
    supersede(full_house.store, "sft", fingerprint)
    plan = full_house.plan()
    assert plan.of("sft").fingerprint == fingerprint
    assert plan.of("sft").state == "+"
    assert without(plan, "=") == after({"sft"})


# Trouble is never "not there".


def test_a_store_that_cannot_be_reached_makes_no_plan(tmp_path: Path):
    house = House(
        write_code(tmp_path / "root"), LocalStore(tmp_path / "gone/store"), tmp_path / "w"
    )
    with pytest.raises(StoreError):
        house.plan()


def test_a_damaged_manifest_makes_no_plan(house: House):
    manifest = house.build(until="shards")["shards"]
    house.store.put(f"shards/{manifest.fingerprint}/manifest.json", b"{")
    with pytest.raises(ArtifactError, match="shards"):
        house.plan()


# Estimates.


def test_a_stage_takes_as_long_as_it_took(full_house: House):
    run = dataclasses.replace(RUN, rows=dataclasses.replace(RUN.rows, buffer_documents=5))
    estimate = full_house.plan(run, placement=PLACEMENT).of("rows").estimate
    assert estimate is not None
    assert estimate.seconds == 100
    assert estimate.dollars == pytest.approx(0.1)
    assert estimate.source == "last time"
    assert full_house.plan(run).of("rows").estimate is None


def test_pretraining_is_scaled_by_its_flops(built: House):
    manifest = built.plan().of("pretrain").manifest
    assert manifest
    steps = RUN.pretrain.num_steps * 2
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=steps))
    estimate = built.plan(run, placement=PLACEMENT).of("pretrain").estimate
    assert estimate is not None
    assert estimate.seconds == pytest.approx(200)
    assert manifest.name in estimate.source


def test_without_history_only_pretraining_has_an_estimate(house: House):
    plan = house.plan(placement=PLACEMENT)
    estimates = {i.stage.name: i.estimate for i in plan.stages if i.estimate is not None}
    assert set(estimates) == {"pretrain"}
    assert "guess" in estimates["pretrain"].source
    gpu = dataclasses.replace(PLACEMENT, gpus=8)
    faster = house.plan(placement=gpu).of("pretrain").estimate
    assert faster is not None
    assert "MFU" in faster.source
    assert faster.seconds < estimates["pretrain"].seconds


def test_a_time_on_another_kind_of_device_tells_nothing(full_house: House):
    gpu = dataclasses.replace(PLACEMENT, gpus=1)
    plan = full_house.plan(scaling.run_for_depth(5), placement=gpu)
    assert plan.of("sft").estimate is None
    assert plan.of("rows").estimate is not None  # runs on the CPU anyway


def test_a_resumed_stage_takes_what_is_left(house: House):
    house.build(run=dataclasses.replace(RUN, seed=1))
    house.build(until="rows")
    checkpoint(house, "pretrain", 300, total=400)
    estimate = house.plan(placement=PLACEMENT).of("pretrain").estimate
    assert estimate is not None
    assert estimate.seconds == pytest.approx(25)


# As text and JSON.


def test_the_text_has_a_line_a_stage_and_a_summary(house: House):
    house.build(run=dataclasses.replace(RUN, seed=1))
    house.build(until="rows")
    checkpoint(house, "pretrain", 300, total=400)
    lines = render(house.plan(placement=PLACEMENT))
    assert [line.split()[1] for line in lines[: len(STAGES)]] == NAMES
    assert "".join(line[0] for line in lines[: len(STAGES)]) == "=====>?~~~????"
    assert lines[-2] == ""
    assert "1 to resume" in lines[-1]
    assert "5 up to date" in lines[-1]
    assert "about" in lines[-1]
    assert all(line == line.rstrip() and line.isascii() for line in lines)


def test_the_json_says_the_same(built: House):
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=7))
    plan = built.plan(run, placement=PLACEMENT)
    tree = json.loads(plan.to_json())
    assert tree["exit_code"] == 2
    assert [item["stage"] for item in tree["stages"]] == NAMES
    pretrain = tree["stages"][NAMES.index("pretrain")]
    assert pretrain["state"] == "~"
    assert pretrain["changes"] == [
        {
            "kind": "config",
            "name": "pretrain.num_steps",
            "old": str(RUN.pretrain.num_steps),
            "new": "7",
        }
    ]
    assert pretrain["fingerprint"] == plan.of("pretrain").fingerprint


# Speed, and what a plan does without.


def test_planning_loads_neither_torch_nor_prefect_nor_boto3():
    modules = "flows.plan, flows.runs, infra.storage.open"
    code = f"import sys, {modules}; print(*{{'torch', 'prefect', 'boto3'}} & sys.modules.keys())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == ""


def test_of_many_old_artifacts_only_the_latest_are_read(house: House):
    for seed in range(8):
        house.build(run=dataclasses.replace(RUN, seed=seed), until="shards")
    for number in range(40):  # of artifacts that were put aside
        house.store.put(f"index/shards/20300101t000000z-{number:064d}", b"")
    reads: list[str] = []

    class Counting(LocalStore):
        def get(self, key: str) -> bytes:
            reads.append(key)
            return super().get(key)

    store = Counting(house.root.parent / "store")
    make_plan(RUN, store, house.work, root=house.root)
    assert len(reads) < 30
