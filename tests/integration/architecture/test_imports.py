"""What loads without what."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ORCHESTRATION = ("prefect", "boto3", "botocore", "duckdb", "fastapi", "uvicorn", "uvloop")
# What a machine that runs GPU stages may lack.
NOT_FOR_WORKERS = (*ORCHESTRATION, "rustbpe", "cyclopts", "altair", "starlette", "pydantic")
WITHOUT_TORCH = (
    "tasks",
    "nanochat_core.build_kernels",
    "nanochat_core.config",
    "nanochat_core.data",
    "nanochat_core.errors",
    "nanochat_core.job",
    "nanochat_core.scaling",
    "nanochat_core.tokenizer",
)
# Imports every module under the names given last; the names given first cannot be imported.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
for name in sys.argv[2].split(","):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        try:
            if ".server" not in module.name:
                importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # torch brings it only with CUDA, for kernels alone
                raise
"""


def import_all(names: tuple[str, ...], *, without: tuple[str, ...]) -> str:
    """Import in a process of its own; returns what went wrong."""
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(without), ",".join(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr


@pytest.mark.torch
def test_the_core_loads_without_orchestration_cloud_and_web() -> None:
    assert import_all(("nanochat_core",), without=NOT_FOR_WORKERS) == ""


def test_data_tokenizer_and_tasks_load_without_torch() -> None:
    assert import_all(WITHOUT_TORCH, without=("torch", *ORCHESTRATION)) == ""


def test_making_examples_loads_neither_another_task_nor_the_sandbox() -> None:
    code = (
        "import sys\nfrom tasks import registry\nregistry.task_named('humaneval')\n"
        "names = sorted(m for m in sys.modules if m[:6] == 'tasks.')\n"
        "print(registry.is_gradable('humaneval'), *names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = ["base", "humaneval", "kinds", "kinds.sources", "names", "plugins", "registry"]
    assert done.stdout.split() == ["True", *(f"tasks.{name}" for name in modules)]


def test_asking_for_the_snapshot_of_the_text_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pyarrow", "multiprocessing", "importlib.metadata", "tiktoken"}
    code = (
        "import sys; from nanochat_core.data.text.pydocs import python_snapshot; "
        f"python_snapshot(); print(*{heavy!r} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
