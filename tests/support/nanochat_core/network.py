"""A network that is not there."""

import socket
from typing import NoReturn

import pytest


class NetworkUsed(AssertionError):
    """Somebody opened a connection."""


def pull_the_plug(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on connections cannot be opened, nor names looked up, by this process."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NetworkUsed(args)

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
