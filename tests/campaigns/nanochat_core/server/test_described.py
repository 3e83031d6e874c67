"""Schemathesis finds nothing in a hundred examples of each route."""

import pytest

from tests.integration.nanochat_core.server.test_described import search
from tests.support.nanochat_core.server.live import Live


@pytest.mark.filterwarnings("ignore")  # of schemathesis' own dependencies
def test_schemathesis_finds_nothing(live: Live):
    search(live, examples=100)
