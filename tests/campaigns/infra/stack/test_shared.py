"""A stack without a server of its own: its worker takes runs of a server that others keep."""

import os
from pathlib import Path

import pytest

from infra.prefect.access import AUTH
from infra.prefect.server import Server
from tests.support.infra.stack.live import LiveStack, wait_for

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(900)]


def test_a_stack_on_a_shared_server_is_workers_only(tmp_path: Path, server: Server) -> None:
    stack = LiveStack(tmp_path / "home")
    stack.environment |= {"PREFECT_API_URL": server.api_url, AUTH: os.environ[AUTH]}
    try:
        up = stack.up("--pool", "cpu")
        assert up.returncode == 0, up.stdout + up.stderr
        assert up.stderr == ""
        assert f"Prefect      {server.ui_url}" in up.stdout
        assert stack.server is None
        assert stack.worker("gpu") is None
        # Its worker makes the pool, some seconds after it was started.
        wait_for(lambda: bool(stack.ask("/work_pools/filter", {})), "the pool")
        stack.deploy_toy()
        run = stack.start_toy("shared")
        stack.finish_toy("shared")
        stack.wait_for_state(run, "Completed")
    finally:
        down = stack.down()
    assert down.stdout == "stopped\n"
    assert stack.processes() == []
    assert stack.ask("/admin/version")  # it is not ours to stop
