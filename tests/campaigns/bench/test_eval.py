"""The bench of evaluation beside a checkout of nanochat."""

import os

import pytest

from tests.integration.bench.test_eval import CASES, CHATS, run_bench

pytestmark = pytest.mark.torch


def test_the_peer_gives_the_same_answers() -> None:
    if "NANOCHAT_DIR" not in os.environ:
        pytest.skip("NANOCHAT_DIR names no checkout of nanochat")
    told, _ = run_bench(dict(os.environ))
    assert told["ratios"]["ours fp32"].keys() == CASES | CHATS | {"core"}
    assert told["equal"]["ours fp32"] == {
        **{case: [1, 1] for case in CASES},
        "categorical": [3, 3],
        "generative": [1, 1],
    }
