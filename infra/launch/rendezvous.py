"""Rendezvous of a job on several machines: who takes part, torchrun's options, node 0's address.

The scheduler that started the machines has numbered them, and says so in its variables
(`ENVIRONMENTS`). Ranks are numbered by machine: with two processes each, those of node 1 are ranks
2 and 3. So rank 0, which writes the job's files, is always on node 0.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from infra.storage.s3.settings import endpoint_setting
from nanochat_core.errors import ConfigError

# From the first machine's torchrun to the last one's; of ranks without torchrun see
# nanochat_core/runtime/hardware/distributed.py.
SECONDS_TO_JOIN = 120
_NOWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent to it
_ALONE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The machines that a scheduler started together, and this one's number among them."""

    nodes: int
    node: int
    address: str | None  # at which the others reach node 0; None: node 0 finds its own


@dataclass(frozen=True)
class Environment:
    """The variables by which one scheduler describes a gang."""

    name: str
    nodes: str
    node: str
    address: str
    first: Callable[[str], str] = str  # node 0's address in the value of `address`
    step: str | None = None  # set only in processes that are the gang's, one on each machine


def _first_host(hosts: str) -> str:
    """Return the first host of Slurm's list: "gpu03" of "gpu[03-05,9],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def _first_line(lines: str) -> str:
    return next(iter(lines.split()), "")


# The first one of which both numbers are set counts: torchrun's and SkyPilot's may be set inside a
# job of Slurm or Kubernetes. Kubernetes sets the index in the pods of every indexed Job, and
# infra/kubernetes/jobset/jobset.yaml the other two.
ENVIRONMENTS = (
    Environment("torchrun", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    Environment(
        "SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", _first_line
    ),
    Environment("Kubernetes", "NANOCHAT_NODES", "JOB_COMPLETION_INDEX", "NANOCHAT_ADDRESS"),
    # A batch script has the first two variables as well: only what `srun` starts is on every node.
    Environment(
        "Slurm",
        "SLURM_NNODES",
        "SLURM_NODEID",
        "SLURM_JOB_NODELIST",
        _first_host,
        step="SLURM_STEP_ID",
    ),
)


def find_gang(
    *,
    nodes: int | None = None,
    node: int | None = None,
    address: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Gang:
    """Return the gang that the arguments describe; what is None comes from the environment.

    Without either this machine is alone. Raises ConfigError if a scheduler's value is no number, or
    if this machine's number is not one of `nodes`.
    """
    values = os.environ if environment is None else environment
    found = next((e for e in ENVIRONMENTS if _describes(e, values)), None)
    if found is not None:
        nodes = _number(values, found.nodes) if nodes is None else nodes
        node = _number(values, found.node) if node is None else node
        address = address or values.get("NANOCHAT_ADDRESS")
        address = address or found.first(values.get(found.address, ""))
    nodes, node = 1 if nodes is None else nodes, node or 0
    source = f" ({found.name}'s {found.nodes} and {found.node})" if found else ""
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}{source}", hint="at least 1")
    if not 0 <= node < nodes:
        raise ConfigError(
            f"--node is {node}, --nodes is {nodes}{source}", hint=f"numbers are 0 to {nodes - 1}"
        )
    return Gang(nodes=nodes, node=node, address=address or None)


def _describes(environment: Environment, values: Mapping[str, str]) -> bool:
    names = (environment.nodes, environment.node, environment.step)
    return all(values.get(name) for name in names if name)


def _number(values: Mapping[str, str], name: str) -> int:
    try:
        return int(values[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {values[name]!a}, not a number of machines",
            hint="give --nodes and --node, or start a fixed number of machines",
        ) from None


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
            # After a loss all nodes restart together, from a checkpoint and with a new id.
            "--max-restarts=0",
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
        """Return variables that name the network interface of gloo and NCCL, where not yet set.

        By default gloo takes the interface to which this machine's name resolves; inside a
        container or a namespace that may be the wrong one.
        """
        given = os.environ.get("NANOCHAT_INTERFACE")
        host = self.endpoint.rpartition(":")[0]
        interface = given or find_interface(host) or find_interface(_route(host))
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
    return _route(toward)


def _route(toward: str | None) -> str:
    """Return this machine's address on the way to `toward`, else to a distant host, else any."""
    for target in (toward, _NOWHERE):
        if target and not _is_loopback(found := _address_toward(target)):
            return found
    others = [found for _, found in _interfaces() if not _is_loopback(found)]
    return others[0] if others else _ALONE


def find_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def store_host(url: str) -> str | None:
    """Return the host of an S3 store that is not AWS; None for any other store."""
    if not url.startswith("s3://"):
        return None
    return urlsplit(os.environ.get(endpoint_setting(), "")).hostname


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


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
