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


def test_without_a_limit_a_row_is_a_line_and_columns_are_aligned():
    lines = Table(columns=COLUMNS, rows=ROWS[1:]).lines()
    assert len(lines) == len(ROWS)
    assert {line.index(row[2]) for line, row in zip(lines, ROWS, strict=True)} == {32}
    assert {line.index(row[3]) + len(row[3]) for line, row in zip(lines, ROWS, strict=True)} == {72}


@pytest.mark.parametrize("width", [1, 20, 34, 40, 60, 72, 80, 100, 1000])
@pytest.mark.parametrize("indent", ["", "  "])
def test_with_a_limit_no_word_is_lost_and_no_line_is_too_long(width, indent):
    lines = Table(columns=COLUMNS, rows=ROWS[1:], indent=indent).lines(width=width)
    assert " ".join(lines).split() == " ".join(map(" ".join, ROWS)).split()
    longest = max(len(indent) + 4 + len(word) for line in lines for word in line.split())
    # The first column is never broken, nor is a word.
    assert max(map(len, lines)) <= max(width, longest, len(indent) + 20)
    rows = [line for line in lines if not line.startswith(f"{indent}    ")]
    assert [line.split()[0] for line in rows] == [row[0] for row in ROWS]


def test_what_follows_the_last_column_that_fits_stays_on_the_line_if_it_can():
    rows = [
        ("= a", "", ""),
        ("~ b", "5 s (at the pace of b/1a2b)", "x 1 -> 2"),
        ("? c", "1 s", "y"),
    ]
    table = Table(columns=texts(*"abc"), rows=rows, head=False)
    assert table.lines(width=30) == [
        "= a",
        "~ b",
        "    5 s (at the pace of",
        "    b/1a2b)  x 1 -> 2",
        "? c  1 s  y",
    ]


def test_no_rows_are_no_lines():
    assert Table(columns=COLUMNS, rows=[]).lines() == []


def test_a_column_has_a_rule_for_colours_and_a_cell_may_have_its_own():
    column = Column("state", tone=lambda text: text[0])
    table = Table(columns=[Column("n", right=True), column], rows=[("1", "ab"), ("20", "c")])
    painted = table.lines(paint=lambda text, tone: f"<{tone}>{text}" if tone else text)
    assert painted == [" n  state", " 1  <a>ab", "20  <c>c"]
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
