"""What loads without what."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORCHESTRATION = ("prefect", "boto3", "botocore", "duckdb", "fastapi", "uvicorn")
WITHOUT_TORCH = (
    "tasks",
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
        if ".server" not in module.name:
            importlib.import_module(module.name)
"""


def import_all(names: tuple[str, ...], *, without: tuple[str, ...]) -> str:
    """Import in a process of its own; returns what went wrong."""
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(without), ",".join(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr


@pytest.mark.torch
def test_the_core_loads_without_orchestration_cloud_and_web() -> None:
    assert import_all(("nanochat_core",), without=ORCHESTRATION) == ""


def test_data_tokenizer_and_tasks_load_without_torch() -> None:
    assert import_all(WITHOUT_TORCH, without=("torch", *ORCHESTRATION)) == ""


def test_a_blocked_module_would_be_noticed() -> None:
    assert "ModuleNotFoundError" in import_all(("nanochat_core.config",), without=("dataclasses",))
