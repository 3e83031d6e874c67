"""Fixtures of tests.support.flows.fixtures, and each chart drawn once a process."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vl_convert

from tests.support.flows.fixtures import built, counted, full_house, house, polls, store, terminal

__all__ = ["built", "counted", "full_house", "house", "polls", "store", "terminal"]

DRAW = {name: getattr(vl_convert, name) for name in ("vegalite_to_svg", "vegalite_to_png")}


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Draw each specification once a process: most pages of tests show the same charts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in DRAW.items():
            patch.setattr(vl_convert, name, _once(draw))
        yield


@pytest.fixture
def drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw whatever a test shows, as a command does."""
    for name, draw in DRAW.items():
        monkeypatch.setattr(vl_convert, name, draw)


def _once(draw: Callable[..., Any]) -> Callable[..., Any]:
    drawn = functools.cache(lambda text, **options: draw(json.loads(text), **options))
    return lambda spec, **options: drawn(json.dumps(spec), **options)
