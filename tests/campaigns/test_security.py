import subprocess
import sys

from tests.campaigns.security import records
from tests.campaigns.security.__main__ import render
from tests.campaigns.security.rows import Row


def test_the_table_counts_what_held_and_names_what_got_through():
    rows = [
        Row(part="walls", attempts=5, got_through=(), seconds=1.4),
        Row(part="doors", attempts=3, got_through=("a key: copied",), seconds=2.0),
    ]
    assert render(rows).splitlines()[2:] == [
        "| walls | 5 | 5 | 0 | 1 |",
        "| doors | 3 | 2 | 1 | 2 |",
        "doors: a key: copied",
    ]


def test_a_part_that_does_not_exist_is_refused():
    command = [sys.executable, "-m", "tests.campaigns.security", "cellar"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part cellar; there is sandbox, records" in done.stderr


def test_a_malformed_record_ends_no_command_with_a_traceback():
    commands = (("status",), ("ls", "--json"), ("plan", "tiny"), ("sql", "select * from stages"))
    (row,) = records.run(rounds=1, commands=commands)
    assert row.got_through == ()
    assert row.attempts > 60
