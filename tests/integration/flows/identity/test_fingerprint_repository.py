"""Every module of this repository: which stages it decides, and what of it decides nothing.

On a copy of the packages, so that a module can be edited.
"""

import ast
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from flows.building.code_check import leaked_modules
from flows.identity.fingerprint import (
    CARRIERS,
    PACKAGES,
    REPOSITORY,
    Code,
    canonical_config,
    code_of,
    identify,
    named_modules,
)
from flows.profiles import open_profile
from flows.stages import CHAT_EVALS, RL, STAGES, TASK_DATA
from nanochat_core.config import RunConfig
from tests.support.flows.repository import copy_packages

RUN = open_profile("d12").run  # its chat evaluations name a task of every kind


def closures_of(code: Code, run: RunConfig = RUN) -> dict[str, dict[str, str]]:
    return {s.name: code_of(s, canonical_config(s, run), code=code) for s in STAGES}


@functools.cache
def current() -> tuple[Code, dict[str, dict[str, str]]]:
    """Return the code of this repository and its closures."""
    code = Code(REPOSITORY)
    return code, closures_of(code)


def reached() -> list[str]:
    """Return the modules and data files that decide some stage."""
    return sorted({name for closure in current()[1].values() for name in closure})


def code_of_conversations() -> dict[str, str]:
    """Return the code of task `conversation`, which no profile names yet."""
    dataset = {"name": "conversation", "grade": 1, "num_train": 1, "num_test": 1}
    config = canonical_config(TASK_DATA, RUN)
    named = {**config, "task_data": {**config["task_data"], "datasets": [dataset]}}
    return code_of(TASK_DATA, named, code=current()[0])


def modules() -> list[str]:
    return [name for name in reached() if "/" not in name]


CHANGE = "\nCHANGED = 1\n"  # of a module's meaning
ROUNDS = 10  # of edits; each file is edited in half of them, no two files in the same

# Files next to the code that decide no artifact, or do so by values that are hashed elsewhere.
UNHASHED = {
    "infra/": "how machines are started",
    "nanochat_core/server/page/": "the chat page",
    "tasks/generated/persona.toml": "files that `nanochat identity` writes, which count themselves",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_packages(tmp_path_factory.mktemp("repository"))


def closures(root: Path, run: RunConfig = RUN) -> dict[str, dict[str, str]]:
    return closures_of(Code(root), run)


def path_of(root: Path, module: str) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


@pytest.fixture(scope="module")
def before(copy: Path) -> dict[str, dict[str, str]]:
    """What the copy gives while nothing in it is edited."""
    return closures(copy)


def changed_stages(before: dict[str, dict[str, str]], root: Path) -> set[str]:
    after = closures(root)
    return {name for name in before if before[name] != after[name]}


@contextlib.contextmanager
def edited(sources: dict[Path, str]) -> Iterator[None]:
    """Give files other texts; afterwards they are as they were."""
    originals = {path: path.read_bytes() for path in sources}
    try:
        for path, source in sources.items():
            path.write_text(source)
        yield
    finally:
        for path, original in originals.items():
            path.write_bytes(original)


# What decides nothing.


class _OtherWords(ast.NodeTransformer):
    """Another docstring wherever there may be one, and a statement that does nothing."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            node.body = [ast.Expr(ast.Constant("Other words.")), *body, ast.Pass()]
        return node


def _said_otherwise(source: str) -> str:
    """The same program with other docstrings and another layout, and without its comments."""
    tree = ast.fix_missing_locations(_OtherWords().visit(ast.parse(source)))
    return f"# At the top.\n\n{ast.unparse(tree)}\n# At the end.\n"


def test_words_and_layout_of_no_module_decide_anything(copy, before):
    paths = [path_of(copy, name) for name in modules()]
    with edited({path: _said_otherwise(path.read_text()) for path in paths}):
        assert closures(copy) == before


def test_what_no_stage_reaches_decides_nothing(copy, before):
    reached = {path_of(copy, name) for name in modules()}
    files = {path for package in PACKAGES for path in (copy / package).rglob("*.py")}
    others = files - reached
    assert {path_of(copy, name) for name in CARRIERS} <= others
    with edited({path: path.read_text() + CHANGE for path in others}):
        assert changed_stages(before, copy) == set()


# What decides.


@pytest.fixture(scope="module")
def edits(copy: Path) -> dict[str, tuple[Path, str]]:
    """The file of each name in a closure, and another text for it."""
    return {name: _edit(copy, name) for name in reached()}


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_an_edit_decides_exactly_the_stages_that_reach_the_file(copy, before, edits, round_):
    """A statement of a module, a byte of a data file: what is hashed of it changes, and no other.

    Half of the files are edited at a time. Each has rounds of its own, as many as any other: so of
    any two files, each is edited without the other.
    """
    rounds = itertools.combinations(range(ROUNDS), ROUNDS // 2)
    names = [name for name, own in zip(reached(), rounds, strict=False) if round_ in own]
    assert len(reached()) <= math.comb(ROUNDS, ROUNDS // 2)
    with edited(dict(edits[name] for name in names)):
        after = closures(copy)
    for stage, closure in before.items():
        assert after[stage].keys() == closure.keys()
        changed = {name for name in closure if closure[name] != after[stage][name]}
        assert changed == closure.keys() & set(names), stage


def _edit(root: Path, name: str) -> tuple[Path, str]:
    path = root / name if "/" in name else path_of(root, name)
    return path, path.read_text() + ("\n" if "/" in name else CHANGE)


def test_every_file_beside_the_code_is_hashed_or_known_to_decide_nothing():
    """The files are found by walking the folders: the closure may be what is wrong."""
    files = [
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed"
    ]
    assert len(files) > 30
    unhashed = [name for name in files if name.startswith(tuple(UNHASHED))]
    hashed = {name for name in [*reached(), *code_of_conversations()] if "/" in name}
    assert sorted(set(files) - set(unhashed) - hashed) == []
    assert set(unhashed) & hashed == set()
    assert [name for name in UNHASHED if not any(f.startswith(name) for f in unhashed)] == []


# Another tool's opinion.


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_closure_is_what_another_tool_finds(graph, stage):
    """Less the carriers and what only they reach, and the packages, which are empty."""
    found: set[str] = set()
    waiting = [stage.entry, *named_modules(stage, canonical_config(stage, RUN))]
    while waiting:
        name = waiting.pop()
        if name not in found and name not in CARRIERS:
            found.add(name)
            waiting += graph.find_modules_directly_imported_by(name)
    ours = {name for name in current()[1][stage.name] if "/" not in name}
    assert set(_not_packages(ours)) == set(_not_packages(found))


def _not_packages(names: set[str]) -> Iterator[str]:
    yield from (name for name in names if path_of(REPOSITORY, name).name != "__init__.py")


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_training_on_conversations_depends_on_no_engine_and_no_sandbox(stage):
    names = current()[1][stage]
    kernels = "nanochat_core/model/native/", "nanochat_core.model.native"
    own = {n for n in names if not n.startswith((*kernels, "nanochat_core.runtime.hardware.cpp_"))}
    assert len(own) <= 64
    assert not [name for name in names if "engine" in name or "sandbox" in name]


CODE_GRADERS = {stage.name for stage in CHAT_EVALS}


@pytest.mark.parametrize(("profile", "expected"), [("d12", CODE_GRADERS), ("tiny", set())])
def test_a_change_of_the_sandbox_decides_only_evaluations_that_grade_programs(
    copy, profile, expected
):
    run = open_profile(profile).run
    before = closures(copy, run)
    path = path_of(copy, "tasks.sandbox.run")
    with edited({path: path.read_text() + CHANGE}):
        after = closures(copy, run)
    assert {name for name in before if before[name] != after[name]} == expected


def test_a_stage_depends_on_the_tasks_that_its_configuration_names():
    run = open_profile("tiny").run
    found = closures_of(current()[0], run)
    assert run.rl.task == "arithmetic"
    assert "tasks.generated.arithmetic" in found["rl"]
    assert "tasks.generated.spelling" not in found["rl"]
    assert {"tasks.generated.spelling", "tasks/generated/words.txt"} <= found["task_data"].keys()
    assert "tasks.gsm8k" not in found["task_data"]
    of_nine = current()[1]["task_data"]  # the first of tiny's tasks imports its others
    assert {"tasks.smoltalk", "tasks.gsm8k", "tasks.humaneval"} <= of_nine.keys()
    for stage in (TASK_DATA, RL, *CHAT_EVALS):  # and where a task is decides nothing
        assert "tasks.names" not in found[stage.name]


def test_a_task_that_is_loaded_and_not_named_is_found_out():
    inputs = {source.name: "0" * 64 for source in RL.inputs}
    identity = identify(RL, open_profile("tiny").run, inputs, code=current()[0])
    loaded = ("tasks", "tasks.names", "tasks.registry", "tasks.generated.arithmetic", "tasks.gsm8k")
    assert leaked_modules(identity, loaded) == ["tasks.gsm8k"]
