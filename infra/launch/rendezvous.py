"""Rendezvous of a job on several machines: torchrun's options, and this machine's own address.

Ranks are numbered by machine: with two processes each, those of node 1 are ranks 2 and 3. So rank
0, which writes the job's files, is always on node 0.
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
_NOWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent to it
_ALONE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One machine's part in a job of several."""

    nodes: int
    node: int  # this machine's number; 0 hosts the rendezvous
    endpoint: str  # host:port at which node 0 listens
    id: str  # of this attempt: ranks of another attempt cannot join

    def first_rank(self, processes: int) -> int:
        """Return the lowest rank on this machine, which runs `processes` ranks."""
        return self.node * processes

    def words(self) -> list[str]:
        """Return the rendezvous options of torchrun."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            # The c10d backend would number nodes by the order of their addresses.
            "--rdzv-backend=static",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.id}",
            f"--rdzv-conf=timeout={SECONDS_TO_JOIN}",
            # After a loss all nodes restart together, from a checkpoint and with a new id.
            "--max-restarts=0",
        ]

    def environment(self) -> dict[str, str]:
        """Return variables that name the network interface of gloo and NCCL, where not yet set.

        By default gloo takes the interface to which this machine's name resolves; inside a
        container or a namespace that may be the wrong one.
        """
        given = os.environ.get("NANOCHAT_INTERFACE")
        host = self.endpoint.rpartition(":")[0]
        interface = given or find_interface(own_address(toward=host))
        wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": given}
        return {name: value for name, value in wanted.items() if value and name not in os.environ}


def own_address(*, toward: str | None = None) -> str:
    """Return the address at which other machines reach this one.

    NANOCHAT_ADDRESS, else that of the interface NANOCHAT_INTERFACE, else the source address of
    packets to `toward` or to a distant host; 127.0.0.1 if there is no other.
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
    """Return host:port of this machine with a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{own_address(toward=toward)}:{probe.getsockname()[1]}"


def store_host(url: str) -> str | None:
    """Return the host of an S3 store that is not AWS; None for any other store."""
    if not url.startswith("s3://"):
        return None
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((value for name in names if (value := os.environ.get(name))), "")
    return urlsplit(endpoint).hostname


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # struct ifreq: the name takes 16 bytes with its end, the address is at offset 20.
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none, or this is no Linux
                continue
            yield name, socket.inet_ntoa(answer[20:24])


def _address_toward(target: str) -> str:
    """Return the source address of a packet to `target`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket only looks the route up; the port does not matter.
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no way there
        return _ALONE


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
