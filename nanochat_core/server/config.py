"""How a server may be used. Both command lines have their defaults from here; nothing heavy is
imported for it.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nanochat_core.errors import ConfigError

Overflow: TypeAlias = Literal["drop", "refuse"]
Log: TypeAlias = Literal["none", "access", "contents"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server may be used."""

    max_waiting: int = 64  # answers that wait at each engine process
    max_seconds: float = 600.0  # of one request, its wait included
    overflow: Overflow = "drop"  # what to do with a conversation longer than the context
    keys: tuple[str, ...] = ()  # one of them is asked for by every route but /health; none: open
    hosts: tuple[str, ...] = ()  # names this server answers to; none: any
    origins: tuple[str, ...] = ()  # web pages elsewhere that may ask from a browser
    log: Log = "access"
    ping_seconds: float = 15.0  # of silence, before a stream is told that it is alive
    drain_seconds: float = 20.0  # for the answers under way when the server is asked to stop

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ConfigError(f"max-waiting is {self.max_waiting}", hint="0 or more answers")
        if not 0 < self.max_seconds < math.inf:  # nor is it no number
            raise ConfigError(f"max-seconds is {self.max_seconds:g}", hint="above 0, and finite")
