"""Several machines run one job: what each has to know to meet the others, and its own address.

Ranks are numbered by machine: with two processes each, those of node 1 are ranks 2 and 3. So rank
0, which writes what the job leaves, is always on node 0. torchrun's "static" rendezvous keeps that
promise; its c10d rendezvous numbers machines by the order of their addresses.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

SECONDS_TO_JOIN = 120  # from the first machine's torchrun to the last one's
_SIOCGIFADDR = 0x8915
_NOWHERE = "192.0.2.1"  # kept for documentation: nothing is there, and nothing is sent
_ALONE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One machine's part in a job of several."""

    nodes: int
    node: int  # this machine's number; 0 hosts the rendezvous
    endpoint: str  # host:port at which node 0 listens
    id: str  # of this attempt: ranks of another one cannot join

    def first_rank(self, processes: int) -> int:
        """The lowest rank on this machine, which runs so many processes."""
        return self.node * processes

    def words(self) -> list[str]:
        """Options of torchrun."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.id}",
            f"--rdzv-conf=timeout={SECONDS_TO_JOIN}",
            "--max-restarts=0",  # whoever lost a machine begins again from a checkpoint, together
        ]

    def environment(self) -> dict[str, str]:
        """Which network interface the ranks use, as far as it has to be said.

        Left alone, gloo takes the one that this machine's name stands for, which inside a container
        or a namespace may be another machine's.
        """
        given = os.environ.get("NANOCHAT_INTERFACE")
        host = self.endpoint.rpartition(":")[0]
        interface = given or find_interface(own_address(toward=host))
        wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": given}
        return {name: value for name, value in wanted.items() if value and name not in os.environ}


def own_address(*, toward: str | None = None) -> str:
    """The address at which other machines reach this one.

    NANOCHAT_ADDRESS, else that of the interface NANOCHAT_INTERFACE, else the one from which this
    machine would speak to `toward`, or to a host far away; 127.0.0.1 when it has no other.
    """
    if given := os.environ.get("NANOCHAT_ADDRESS"):
        return given
    addresses = dict(_interfaces())
    if (interface := os.environ.get("NANOCHAT_INTERFACE")) in addresses:
        return addresses[interface]
    for target in (toward, _NOWHERE):
        if target and not _is_loopback(found := _address_toward(target)):
            return found
    others = [found for found in addresses.values() if not _is_loopback(found)]
    return others[0] if others else _ALONE


def own_endpoint(*, toward: str | None = None) -> str:
    """An address of this machine with a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{own_address(toward=toward)}:{probe.getsockname()[1]}"


def store_host(url: str) -> str | None:
    """The host that a store's objects come from, where it is a host of one's own; else None."""
    if not url.startswith("s3://"):
        return None
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((value for name in names if (value := os.environ.get(name))), "")
    return urlsplit(endpoint).hostname


def find_interface(address: str) -> str | None:
    """The network interface that has an address or a name of this machine; None: it is not known.

    Only IPv4 is looked at.
    """
    try:
        number = socket.gethostbyname(address)
    except OSError:
        return None
    return next((name for name, own in _interfaces() if own == number), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Names and IPv4 addresses of this machine's network interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none, or this is no Linux
                continue
            yield name, socket.inet_ntoa(answer[20:24])


def _address_toward(target: str) -> str:
    """The address from which a packet to `target` would leave; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no way there
        return _ALONE


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
