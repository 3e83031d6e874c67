"""Fixtures of tests.support.flows.fixtures, and builders in processes of their own."""

import subprocess
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.support.flows.builder_process import start_builder
from tests.support.flows.fixtures import built, house, make_toys, polls, store, terminal, toys

__all__ = ["built", "house", "make_toys", "polls", "store", "terminal", "toys"]


@pytest.fixture
def builders(toys: Any) -> Generator[Callable[..., "subprocess.Popen[str]"]]:
    """Return a function that starts a builder in the home of that name; end those that are left."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, **options: Any) -> "subprocess.Popen[str]":
        home = toys.home.parent / name
        home.mkdir(exist_ok=True)
        started.append(start_builder(toys, home, toys.placement.store, **options))
        return started[-1]

    yield start
    (toys.home.parent / "go").touch()
    for process in started:
        process.kill()
        process.communicate()
