"""A Prefect server that answers."""

from pathlib import Path

from infra.prefect.records import Server
from infra.prefect.server import start_server, wait_for_server


def ensure_server(home: Path) -> Server:
    """The server of `home`, started unless it runs, once it answers."""
    server = start_server(home)
    wait_for_server(home, server)
    return server
