"""The server's limits and rules. The command line takes its defaults from here, so this imports
nothing slow.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nanochat_core.errors import ConfigError

Overflow: TypeAlias = Literal["drop", "refuse"]
Log: TypeAlias = Literal["none", "access", "contents"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits and rules of one server."""

    max_waiting: int = 64  # answers that wait at each engine process
    max_seconds: float = 600.0  # of one request, its wait included
    overflow: Overflow = "drop"  # what to do with a conversation longer than the context
    keys: tuple[str, ...] = ()  # every route but /health requires one of them; none: open
    hosts: tuple[str, ...] = ()  # host names that this server answers to; none: any
    origins: tuple[str, ...] = ()  # CORS: web pages elsewhere that may send requests
    log: Log = "access"
    ping_seconds: float = 15.0  # of silence before a stream gets a ping, lest a proxy close it
    drain_seconds: float = 20.0  # for the answers under way when the server is asked to stop

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ConfigError(f"max-waiting is {self.max_waiting}", hint="0 or more answers")
        if not 0 < self.max_seconds < math.inf:  # false for NaN too
            raise ConfigError(f"max-seconds is {self.max_seconds:g}", hint="above 0, and finite")
