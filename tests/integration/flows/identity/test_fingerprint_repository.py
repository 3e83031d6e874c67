"""Every module of this repository: which stages it decides, and what of it decides nothing."""

import ast
import functools
import tomllib
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
from flows.identity.syntax import scan
from flows.profiles import open_profile
from flows.stages import CHAT_EVALS, RL, STAGES, TASK_DATA
from nanochat_core.config import RunConfig

RUN = open_profile("d12").run  # its chat evaluations name a task of every kind
CODE = Code(REPOSITORY)


@functools.cache
def closures_of(run: RunConfig = RUN) -> dict[str, dict[str, str]]:
    """Return the code of each stage of a run."""
    return {s.name: code_of(s, canonical_config(s, run), code=CODE) for s in STAGES}


def reached() -> list[str]:
    """Return the modules and data files that decide some stage."""
    return sorted({name for closure in closures_of().values() for name in closure})


def code_of_conversations() -> dict[str, str]:
    """Return the code of task `conversation`, which no profile names yet."""
    dataset = {"name": "conversation", "grade": 1, "num_train": 1, "num_test": 1}
    config = canonical_config(TASK_DATA, RUN)
    named = {**config, "task_data": {**config["task_data"], "datasets": [dataset]}}
    return code_of(TASK_DATA, named, code=CODE)


# Files next to the code that decide no artifact, or do so by values that are hashed elsewhere.
UNHASHED = {
    "infra/": "how machines are started",
    "nanochat_core/server/page/": "the chat page",
    "tasks/generated/persona.toml": "files that `nanochat identity` writes, which count themselves",
}


def path_of(module: str) -> Path:
    path = REPOSITORY.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


class _OtherWords(ast.NodeTransformer):
    """Another docstring wherever there may be one, and a statement that does nothing."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            node.body = [ast.Expr(ast.Constant("Other words.")), *body, ast.Pass()]
        return node


def _said_otherwise(source: bytes) -> bytes:
    """The same program with other docstrings and another layout, and without its comments."""
    tree = ast.fix_missing_locations(_OtherWords().visit(ast.parse(source)))
    return f"# At the top.\n\n{ast.unparse(tree)}\n# At the end.\n".encode()


def test_words_and_layout_of_no_module_decide_anything():
    for path in (path_of(name) for name in reached() if "/" not in name):
        source = path.read_bytes()
        assert scan(_said_otherwise(source), package="a") == scan(source, package="a"), path


def files_beside_the_code() -> list[str]:
    """Return what the folders hold: the closure may be what is wrong."""
    files = [
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed"
    ]
    assert len(files) > 30
    return files


def test_every_file_beside_the_code_is_hashed_or_known_to_decide_nothing():
    files = files_beside_the_code()
    unhashed = [name for name in files if name.startswith(tuple(UNHASHED))]
    hashed = {name for name in [*reached(), *code_of_conversations()] if "/" in name}
    assert sorted(set(files) - set(unhashed) - hashed) == []
    assert set(unhashed) & hashed == set()
    assert [name for name in UNHASHED if not any(f.startswith(name) for f in unhashed)] == []


def test_a_wheel_has_every_file_beside_the_code():
    """Without one an installed package has other fingerprints, or does not run."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packed = {
        path.relative_to(REPOSITORY).as_posix()
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (REPOSITORY / package.replace(".", "/")).glob(pattern)
    }
    image = {"infra/containers/Dockerfile", "infra/containers/Dockerfile.dockerignore"}
    assert set(files_beside_the_code()) - packed == image  # built from a checkout


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
    ours = {name for name in closures_of()[stage.name] if "/" not in name}
    assert _without_packages(ours) == _without_packages(found)


def _without_packages(names: set[str]) -> set[str]:
    return {name for name in names if path_of(name).name != "__init__.py"}


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_training_on_conversations_depends_on_no_engine_and_no_sandbox(stage):
    names = closures_of()[stage]
    assert not [name for name in names if "engine" in name or "sandbox" in name]


CODE_GRADERS = {stage.name for stage in CHAT_EVALS}


@pytest.mark.parametrize(("profile", "expected"), [("d12", CODE_GRADERS), ("tiny", set())])
def test_the_sandbox_decides_only_evaluations_that_grade_programs(profile, expected):
    closures = closures_of(open_profile(profile).run)
    assert {stage for stage, found in closures.items() if "tasks.sandbox.run" in found} == expected


def test_a_stage_depends_on_the_tasks_that_its_configuration_names():
    run = open_profile("tiny").run
    found = closures_of(run)
    assert run.rl.task == "arithmetic"
    assert "tasks.generated.arithmetic" in found["rl"]
    assert "tasks.generated.spelling" not in found["rl"]
    assert {"tasks.generated.spelling", "tasks/generated/words.txt"} <= found["task_data"].keys()
    assert "tasks.gsm8k" not in found["task_data"]
    of_nine = closures_of()["task_data"]  # the first of tiny's tasks imports its others
    assert {"tasks.smoltalk", "tasks.gsm8k", "tasks.humaneval"} <= of_nine.keys()
    for stage in (TASK_DATA, RL, *CHAT_EVALS):  # and where a task is decides nothing
        assert "tasks.names" not in found[stage.name]


def test_a_task_that_is_loaded_and_not_named_is_found_out():
    inputs = {source.name: "0" * 64 for source in RL.inputs}
    identity = identify(RL, open_profile("tiny").run, inputs, code=CODE)
    loaded = ("tasks", "tasks.names", "tasks.registry", "tasks.generated.arithmetic", "tasks.gsm8k")
    assert leaked_modules(identity, loaded) == ["tasks.gsm8k"]
