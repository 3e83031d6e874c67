"""Numbers, durations and times as people say them, and text that others wrote."""

import pytest

from flows.render.text import (
    MAX_SHOWN,
    ago,
    count,
    duration,
    key_of,
    listed,
    money,
    percent,
    size,
    visible,
)

NOON = 1_795_262_400.0  # 2026-11-21T12:00:00Z


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (count, {7: "7", 1_500: "1.5 k", 4_812_345: "4.81 M", 999_900_000: "1 B", 3e14: "300 T"}),
        (size, {12: "12 bytes", 1_482_000: "1.5 MB", 10**10: "10.0 GB"}),
        (percent, {0.1234: "12.3 %"}),
        (money, {1234.5: "$1,234.50", 0.25: "$0.25", 0.0: "no price"}),
        (listed, {range(1, 5): "1, 2, 3, 4", range(1, 21): "1, 2, 3, 4 and 16 more", (): ""}),
        (key_of, {"eval-My_run chat_eval_sft": "eval-my-run-chat-eval-sft"}),
        (duration, {0.0: "0 s", 0.043: "0.04 s", 4.21: "4.2 s", 9.98: "10 s"}),
        (duration, {75: "1 min 15 s", 720: "12 min", 3601: "1 h", 3725: "1 h 2 min"}),
        (duration, {172_799: "47 h 59 min", 172_800: "2 days", 652_944_960: "20 years 8 months"}),
        (visible, {"a\n\tb\x00\u202e": "a\n\tb\\x00\\u202e"}),
        (visible, {"x" * 10 * MAX_SHOWN: "x" * MAX_SHOWN + "\u2026"}),
    ],
)
def test_values_read_like_people_write_them(write, texts):
    assert {value: write(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0, "just now"), (59.9, "just now"), (60, "1 min ago"), (3599, "59 min ago")),
        *((3 * 3600 + 1800, "3 h ago"), (47 * 3600, "47 h ago"), (48 * 3600, "2 days ago")),
        *((59 * 86_400, "59 days ago"), (61 * 86_400, "2026-11-21")),
        *((-30, "just now"), (-86_400, "2026-11-21")),  # of machines whose clock is ahead
    ],
)
def test_a_time_is_said_by_how_long_ago_it_was(seconds, said):
    assert ago("2026-11-21T12:00:00Z", NOON + seconds) == said


def test_what_is_no_time_is_left_as_it_is():
    for text in ("", "yesterday", "2026-13-45T00:00:00Z", "\x1b[2J"):
        assert ago(text, 0.0) == text
