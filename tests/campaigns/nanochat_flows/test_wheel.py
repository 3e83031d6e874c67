"""The wheel alone, outside a checkout: a whole small run, its report card, an answer."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages import STAGES
from nanochat_flows.packages import PACKAGES
from tests.campaigns.end_to_end.small import DEPTH, PLACE, SETTINGS
from tests.support.installed import Installed, wheel

__all__ = ["wheel"]

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(3600)]


@pytest.fixture
def elsewhere(wheel: Installed, tmp_path: Path) -> Iterator[Installed]:
    """A directory with folders that have the names of our packages."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('another project')\n")
    installed = replace(wheel, cwd=tmp_path, home=tmp_path / "home")
    yield installed
    installed.run("nanochat", "down")


def test_a_small_run_ends_with_a_report_card_and_a_model_that_answers(elsewhere: Installed) -> None:
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    words = ["tiny", "--depth", str(DEPTH), "--gpus", "0", *settings]
    done = elsewhere.run("nanochat", "run", *words, "--name", "small", "--place", *PLACE)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    card = re.search(r"^report card +(.+)$", done.stdout, flags=re.MULTILINE)
    assert card is not None, done.stdout
    assert "<svg" in Path(card[1]).read_text(encoding="utf-8")
    plan = json.loads(elsewhere.run("nanochat", "plan", *words, "--json").stdout)
    made = [item["stage"] for item in plan["stages"] if item["artifact"]]
    assert made == [stage.name for stage in STAGES]
    done = elsewhere.run("nanochat", "chat", "small", "--prompt", "Hi", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
