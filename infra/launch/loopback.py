"""A torchrun rendezvous for the ranks of one machine, which no other host can reach.

torchrun's own rendezvous for that case, `--standalone`, listens on every interface and unpickles
the contents of its store: any client that reaches its port can run code.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

ADDRESS = "127.0.0.1"
BACKEND = "loopback"  # torchrun's --rdzv-backend
SECONDS = 600  # timeout of the ranks' requests to the store


class Loopback(StaticTCPRendezvous):
    """A static rendezvous of one agent, on a port that the system chooses."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=run_id, timeout=SECONDS)
        # Given only an address, TCPStore binds to every interface: it gets our own listener.
        self._store = TCPStore(
            ADDRESS,
            port,
            world_size=1,
            is_master=True,
            timeout=timedelta(seconds=SECONDS),
            multi_tenant=True,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    def get_backend(self) -> str:
        """Return the name that torchrun was given."""
        return BACKEND


def register() -> None:
    """Register the backend with torchrun."""
    rendezvous_handler_registry.register(BACKEND, _open)


def _open(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(str(parameters.run_id))
