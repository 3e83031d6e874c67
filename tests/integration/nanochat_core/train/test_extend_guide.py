"""The stage that docs/contributing/stage.md shows runs, resumes as it says, and stays short."""

import ast
import dataclasses
import re
import types
from pathlib import Path

import pytest

from nanochat_core.model.checkpoint import load_config

pytestmark = pytest.mark.torch
GUIDE = Path(__file__).parents[4] / "docs" / "contributing" / "stage.md"


@pytest.fixture
def text():
    (text,) = re.findall(r"```python\n(\"\"\"Stage .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    return text


@pytest.fixture
def stage(text):
    module = types.ModuleType("longer")
    exec(compile(text, str(GUIDE), "exec"), module.__dict__)
    return module


def test_a_whole_training_stage_takes_at_most_25_lines(text):
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    docstrings = [n for n in found if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    assert len(found) - len(docstrings) <= 25


def test_the_stage_of_the_guide_trains_on_and_resumes(bench, stage):
    base, _ = bench.done("pretrain", "base")

    def job_of(name):
        inputs = {"pretrain": base.output, "rows": bench.data["rows"]}
        return dataclasses.replace(bench.job("pretrain", name), stage="longer", inputs=inputs)

    whole, parts = job_of("whole"), job_of("parts")
    assert stage.run(whole) == {"steps": 6}
    bench.stop_after(3, parts, run=stage.run)
    assert not any(parts.output.iterdir())
    stage.run(parts)
    assert len(bench.losses(whole)) == 6
    assert bench.losses(parts) == bench.losses(whole)
    trained = bench.files(whole.output)
    assert bench.files(parts.output) == trained
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (base.output / name).read_bytes() != trained[name]
    assert load_config(whole.output) == load_config(base.output)
