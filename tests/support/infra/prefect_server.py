"""A Prefect server that answers."""

from pathlib import Path

from infra.prefect.server import Server, start_server, wait_for_server
from tests.support.infra.ports import quiet_port


def ensure_server(home: Path) -> Server:
    """The server of `home`, started unless it runs, once it answers."""
    # Not the usual ports: until a server opens its own, seconds later, another run may take it.
    port = quiet_port()
    server = start_server(home, ports=range(port, port + 50))
    wait_for_server(home, server)
    return server
