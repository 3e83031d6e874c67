"""The bench of the chat server beside a checkout of nanochat."""

import json
import os

import pytest

from tests.integration.bench.test_serve import run

pytestmark = pytest.mark.torch


@pytest.mark.skipif("NANOCHAT_JAN_DIR" not in os.environ, reason="NANOCHAT_JAN_DIR is not set")
def test_the_peer_serves_the_same_weights() -> None:
    told = json.loads(run(dict(os.environ)).stdout.splitlines()[-1])
    assert told["ratio_tokens_per_second"] > 0
    assert told["peer"].keys() == told["ours"].keys()
