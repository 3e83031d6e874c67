"""An ordinary run and its report card, made once."""

from pathlib import Path

import pytest

from tests.support.flows.reported import Card, make_inputs, run_report


@pytest.fixture(scope="package")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of every stage. Tests only look at them."""
    return make_inputs(tmp_path_factory.mktemp("report") / "store")


@pytest.fixture(scope="package")
def card(ordinary: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Card:
    """The page and the markdown."""
    return run_report(tmp_path_factory.mktemp("card"), ordinary)
