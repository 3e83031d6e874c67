"""Ports that stay free until a test's server listens on them."""

import contextlib
import random
import socket
from pathlib import Path

FIRST_EPHEMERAL = 32768  # Linux's default; the kernel gives ports from here on to any connection
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def quiet_port() -> int:
    """Return a port of 127.0.0.1 that no process listens on, and no connection is given."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else FIRST_EPHEMERAL
    choices = random.SystemRandom()
    for _ in range(1000):
        port = choices.randrange(first - 10_000, first) if first > 12_000 else 0
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise RuntimeError(f"a thousand ports below {first} are taken")
