"""Tables fit the terminal: a row that is too long is continued below, and loses no word."""

import pytest

from flows.render.table import Cell, Column, Table, texts

ROWS = [
    ("stage", "made", "run", "size", "why"),
    ("sft", "3 h ago", "tiny-20261121t060000z-1a2b", "1.1 MB", ""),
    (
        "chat_eval_midtrain",
        "just now",
        "a-name-of-my-own-that-is-long",
        "19.3 kB",
        "revoked: " * 12,
    ),
    ("rl", "2 days ago", "d12", "900 bytes", "damaged"),
]


COLUMNS = [Column(name, right=name == "size") for name in ROWS[0]]


def test_a_row_is_a_line_if_there_is_room_and_else_is_continued_and_loses_no_word(transcript):
    for width, indent in ((None, ""), (100, ""), (72, "  "), (40, ""), (20, "  "), (1, "")):
        lines = Table(columns=COLUMNS, rows=ROWS[1:], indent=indent).lines(width=width)
        transcript.check(f"width {width}, indent '{indent}'", "\n".join(lines))
        assert " ".join(lines).split() == " ".join(map(" ".join, ROWS)).split()


def test_what_follows_the_last_column_that_fits_stays_on_the_line_if_it_can(transcript):
    rows = [
        ("= a", "", ""),
        ("~ b", "5 s (at the pace of b/1a2b)", "x 1 -> 2"),
        ("? c", "1 s", "y"),
    ]
    table = Table(columns=texts(*"abc"), rows=rows, head=False)
    transcript.check("width 30", "\n".join(table.lines(width=30)))


def test_no_rows_are_no_lines():
    assert Table(columns=COLUMNS, rows=[]).lines() == []


def test_a_number_is_aligned_right_and_a_cell_has_the_colour_of_its_tone():
    rows = [("1", Cell("ab", tone="a")), ("20", "c")]
    table = Table(columns=[Column("n", right=True), Column("state")], rows=rows)
    painted = table.lines(paint=lambda text, tone: f"<{tone}>{text}" if tone else text)
    assert painted == [" n  state", " 1  <a>ab", "20  c"]
    own = Table(columns=texts("a"), rows=[[Cell("x", ("low", "high"), tone="worse")]])
    assert own.lines(paint=lambda text, tone: f"{tone}: {text}")[1] == "worse: x (low); high"


@pytest.mark.parametrize(
    "shown",
    [
        lambda table: "".join(table.lines()),
        lambda table: table.markdown(),
        lambda table: table.tree()[0]["why"],
    ],
)
def test_text_that_others_wrote_moves_no_cursor_and_turns_no_direction(shown):
    text = shown(Table(columns=texts("why"), rows=[("a\x1b[2K\u202eb",)]))
    assert "\x1b" not in text
    assert "\u202e" not in text
