"""The stage that docs/guides/extend.md shows runs, resumes as the guide says, and stays short."""

import ast
import dataclasses
import re
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_config
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.progress import last_by_step, read_events
from tests.integration.nanochat_core.train.test_resume import stop_after

pytestmark = pytest.mark.torch
MakeJob: TypeAlias = Callable[..., Job]
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "extend.md"


@pytest.fixture
def text() -> str:
    """The source of the guide's module."""
    (text,) = re.findall(r"```python\n(\"\"\"Stage .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    return text


@pytest.fixture
def stage(text: str) -> types.ModuleType:
    """The guide's module."""
    module = types.ModuleType("longer")
    exec(compile(text, str(GUIDE), "exec"), module.__dict__)
    return module


def test_a_whole_training_stage_takes_at_most_25_lines(text: str) -> None:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    docstrings = [n for n in found if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    assert len(found) - len(docstrings) <= 25


def losses(job: Job) -> list[float]:
    """Return the loss of every step."""
    return [v["loss"] for v in last_by_step(read_events(job.events), "step").values()]


def test_the_stage_of_the_guide_trains_on_and_resumes(
    stage: types.ModuleType,
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = make_job("pretrain", tmp_path / "base", data)
    run_stage(base)

    def job_of(name: str) -> Job:
        job = make_job("pretrain", tmp_path / name, data)
        return dataclasses.replace(
            job, stage="longer", inputs={"pretrain": base.output, "rows": data["rows"]}
        )

    whole, parts = job_of("whole"), job_of("parts")
    assert stage.run(whole) == {"steps": 6}
    monkeypatch.setattr(interrupt.STOP, "requested", False)
    before = signal.signal(signal.SIGTERM, interrupt.STOP.on_signal)
    try:
        with monkeypatch.context() as patch:
            stop_after(3, patch)
            with pytest.raises(interrupt.Interrupted):
                stage.run(parts)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(parts.output.iterdir())
    monkeypatch.setattr(interrupt.STOP, "requested", False)
    stage.run(parts)
    assert len(losses(whole)) == 6
    assert losses(parts) == losses(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (parts.output / name).read_bytes() == (whole.output / name).read_bytes()
        assert (base.output / name).read_bytes() != (whole.output / name).read_bytes()
    assert load_config(whole.output) == load_config(base.output)
