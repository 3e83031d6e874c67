"""The bench of the chat server: each limit that is not kept is named (test_gpu.py runs it)."""

import argparse

from bench.serve import broken_limits


def test_each_limit_that_is_not_kept_is_named() -> None:
    ours = {"one_first_token_ms": 13.0, "health_ms": 21.0, "slot_free_ms": 49.0}
    found = {"ours": ours, "ratio_tokens_per_second": 8.0, "ratio_first_token": 19.9}
    limits = {"at_least": 8.0, "at_least_first_token": 20, "most_health_ms": 20}
    options = argparse.Namespace(**limits, most_slot_free_ms=50, most_first_token_ms=12)
    assert broken_limits(options, found) == [
        "first token: 19.9 times, at least 20 wanted",
        "one client's first token: 13.0 ms, at most 12 wanted",
        "/health: 21.0 ms, at most 20 wanted",
    ]
    none = argparse.Namespace(**dict.fromkeys(vars(options)))
    assert broken_limits(none, found) == []
    del found["ratio_tokens_per_second"], found["ratio_first_token"]
    assert len(broken_limits(options, found)) == 2
