"""A stage on two nodes, while a host that is no node connects to node 0's port."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from flows.building.messages import Status
from tests.support.flows.two_nodes import context_of, port_of, start

SOURCE = """
import os


def run(job):
    if os.environ["RANK"] == "0":
        (job.output / "value.txt").write_text("made")
    return {}
"""


@pytest.mark.torch
def test_a_hostile_client_learns_nothing_and_changes_nothing(toys, tmp_path, monkeypatch):
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    contexts = [context_of(toys, tmp_path, name) for name in ("a", "b")]
    stage = toys.stage("train", source=SOURCE, compute="gpu")
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        first = start(pool, stage, contexts[0], 0)
        endpoint, secret = port_of(stage, contexts[1], first)
        host, _, port = endpoint.rpartition(":")
        claim = Status(node=1, host="other", state="ended", text="it failed")
        clients = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30.0))
            for _ in range(2)
        ]
        wrong = "".join("0" if digit != "0" else "1" for digit in secret)
        clients[0].sendall(f"{wrong}\n{json.dumps(asdict(claim))}\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert clients[0].recv(100) == b""
        other = start(pool, stage, contexts[1], 1)  # while another client stays, silent
        assert first.result().manifest == other.result().manifest
