"""Schemathesis finds nothing in a hundred examples of each route."""

import pytest

from tests.integration.nanochat_core.server.test_described import search


@pytest.mark.filterwarnings("ignore")  # of schemathesis' own dependencies
def test_schemathesis_finds_nothing(live):
    search(live, examples=100)
