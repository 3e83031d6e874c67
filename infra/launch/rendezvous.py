"""Rendezvous of a job on several machines: who takes part, torchrun's options, node 0's address.

The scheduler or the user numbers the machines in torchrun's own variables. Ranks are numbered by
machine: with two processes each, those of node 1 are ranks 2 and 3. So rank 0, which writes the
job's files, is always on node 0.
"""

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nanochat_core.errors import ConfigError

# From the first machine's torchrun to the last one's; of ranks without torchrun see
# nanochat_core/runtime/hardware/distributed.py.
SECONDS_TO_JOIN = 120
NODES, NODE, ADDRESS = "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"
INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's own variable
_NOWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent to it
_ALONE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The machines that build a stage together, and this one's number among them."""

    nodes: int
    node: int


def assignments() -> str:
    """Return the variables of this machine, to be put before a command; "" without any."""
    given = ((name, os.environ.get(name)) for name in (NODES, NODE, ADDRESS))
    return "".join(f"{name}={shlex.quote(value)} " for name, value in given if value)


def find_gang(environment: Mapping[str, str] | None = None) -> Gang:
    """Return the gang that torchrun's own variables describe; without them this machine is alone.

    Raises ConfigError if one of them is missing or no number, or if the numbers do not fit.
    """
    values = os.environ if environment is None else environment
    given = [values.get(name) for name in (NODES, NODE)]
    if not any(given):
        return Gang(nodes=1, node=0)
    with contextlib.suppress(ValueError):
        nodes, node = (int(value or "") for value in given)
        if 0 <= node < nodes:
            return Gang(nodes=nodes, node=node)
    raise ConfigError(
        ", ".join(f"{name} is {values.get(name) or 'not set'}" for name in (NODES, NODE)),
        hint="start a fixed number of machines; give each that number, and its own from 0 below it",
    )


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One machine's part in a job of several."""

    nodes: int
    node: int  # this machine's number; 0 hosts the rendezvous
    endpoint: str  # host:port at which node 0 listens
    id: str  # of this attempt: the torchrun of another attempt cannot join

    def first_rank(self, processes: int) -> int:
        """Return the lowest rank on this machine, which runs `processes` ranks."""
        return self.node * processes

    def torchrun_args(self) -> list[str]:
        """Return the rendezvous options of torchrun."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            # The c10d backend would number nodes by the order of their addresses.
            "--rdzv-backend=static",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.id}",
            f"--rdzv-conf=timeout={SECONDS_TO_JOIN}",
        ]

    def rank_environment(self) -> dict[str, str]:
        """Return what torchrun would set for the only rank of this machine."""
        address, _, port = self.endpoint.rpartition(":")
        return {
            "RANK": str(self.node),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }

    def environment(self) -> dict[str, str]:
        """Return the variable that names gloo's network interface, unless it is set.

        By default gloo takes the interface to which this machine's name resolves; inside a
        container or a namespace that may be the wrong one.
        """
        host = self.endpoint.rpartition(":")[0]
        interface = find_interface(host) or find_interface(_route(host))
        return {INTERFACE: interface} if interface and INTERFACE not in os.environ else {}


def own_address() -> str:
    """Return the address at which other machines reach this one.

    PET_MASTER_ADDR, else that of gloo's interface if it is set, else the source address of packets
    to a distant host; 127.0.0.1 if there is no other.
    """
    of_gloo = dict(_interfaces()).get(os.environ.get(INTERFACE, ""))
    return os.environ.get(ADDRESS) or of_gloo or _route(_NOWHERE)


def _route(toward: str) -> str:
    """Return this machine's address on the way to `toward`, else to a distant host, else any."""
    found = [_address_toward(target) for target in (toward, _NOWHERE)]
    found += [address for _, address in _interfaces()]
    return next((each for each in found if not each.startswith("127.")), _ALONE)


def find_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def find_interface(address: str) -> str | None:
    """Return the network interface that has this address or host name, or None.

    Only IPv4 is supported.
    """
    try:
        number = socket.gethostbyname(address)
    except OSError:
        return None
    return next((name for name, own in _interfaces() if own == number), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield names and IPv4 addresses of this machine's network interfaces."""
    import psutil  # slow to import, and few commands need it

    for name, addresses in psutil.net_if_addrs().items():
        yield from ((name, a.address) for a in addresses if a.family == socket.AF_INET)


def _address_toward(target: str) -> str:
    """Return the source address of a packet to `target`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket only looks the route up; the port does not matter.
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no way there
        return _ALONE
