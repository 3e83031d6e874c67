"""Where the ranks of one machine meet: a store that no other host can reach.

torchrun's own rendezvous for that case, `--standalone`, listens on every interface and unpickles
what its store says: whoever reached its port could have code run.
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
SECONDS = 600


class Loopback(StaticTCPRendezvous):
    """A static rendezvous of one agent, on a port that the system chooses."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=run_id, timeout=SECONDS)
        # Without a listener of ours the store would bind to every interface.
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
    """Have torchrun know the backend."""
    rendezvous_handler_registry.register(BACKEND, _open)


def _open(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(str(parameters.run_id))
