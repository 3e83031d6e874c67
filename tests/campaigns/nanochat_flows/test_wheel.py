"""The wheel alone, outside a checkout: a whole small run, its report card, an answer."""

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages import STAGES
from nanochat_flows.packages import PACKAGES
from tests.campaigns.end_to_end.small import DEPTH, PLACE, SETTINGS
from tests.support.flows.waiting import wait_until
from tests.support.infra.ports import quiet_port
from tests.support.installed import Installed, wheel

__all__ = ["wheel"]

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(3600)]

SECONDS_TO_LOAD = 300.0


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
    with serving(elsewhere, "small") as url:
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/chat/completions", body.encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.load(response)["choices"][0]["message"]["role"] == "assistant"


@contextmanager
def serving(installed: Installed, model: str) -> Iterator[str]:
    """`nanochat serve` as long as the block lasts; gives its address."""
    port = quiet_port()
    command = [str(installed.bin / "nanochat"), "serve", model, "--port", str(port)]
    environment = os.environ | {"NANOCHAT_HOME": str(installed.home)}
    process = subprocess.Popen(command, cwd=installed.cwd, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_ready(url), seconds=SECONDS_TO_LOAD)
        assert process.poll() is None
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_ready(url: str) -> bool:
    """Whether the server has loaded its model."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(json.load(response)["ready"])
    except (urllib.error.URLError, ConnectionError):
        return False
