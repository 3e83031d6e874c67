"""No text from a store or a job moves the cursor, hides itself or passes for another line."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.artifacts.runs import point
from flows.cli.output import print_lines, print_note, screen
from flows.leases.held_lease import try_acquire
from flows.render.terminal import Display
from tests.support.flows.claims import claim
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import make_manifest, put_artifact, put_run, todays_shards

ROOT = Path(__file__).parents[4]
HOSTILE = "a\x1b[2J\x1b]0;title\x07\r\x08\x9b1A\u202e\u2066b\x00"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\x0d\x08\x9b1A\u202e\u2066b\x00"
EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "message", "text": HOSTILE},
    {"kind": "warning", "text": HOSTILE},
    {"kind": "waiting", "text": HOSTILE},
    {"kind": "eval", "step": 1, "values": {HOSTILE: 1.0}},
    {"kind": "failed", "error": HOSTILE, "log_tail": f"{HOSTILE}\n{HOSTILE}"},
)


def is_harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_the_events_of_a_job_cannot_move_the_cursor(capsys):
    with Display(screen(), stages=["sft"]) as display:
        for event in EVENTS:
            display.watch("sft", event)
            printed = capsys.readouterr().out
            assert is_harmless(printed)
            assert SHOWN.replace(" ", "") in re.sub(r"\s", "", printed), event


def test_the_bar_of_a_job_cannot_move_the_cursor():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Display(console, stages=["sft"]) as display:
        start = {"step": 0, "total": 2, "unit": HOSTILE, "resumed": False}
        display.watch("sft", {"kind": "start", **start})
        display.watch("sft", {"kind": "step", "step": 1, "total": 2, "values": {HOSTILE: 1.0}})
    drawn = console.file.getvalue()
    assert SHOWN in drawn
    assert "title\x07" not in drawn


def test_a_message_of_a_job_stays_on_the_line_of_its_stage(capsys):
    with Display(screen(), stages=["sft"]) as display:
        display.watch("sft", {"kind": "message", "text": "fine\nrl   failed: no"})
    assert capsys.readouterr().out == "sft  fine rl   failed: no\n"


def test_a_line_from_the_store_cannot_pass_for_two(capsys):
    print_lines([f"why: {HOSTILE}\nwarning: none\there"])
    print_note("host\nerror: none")
    captured = capsys.readouterr()
    assert captured.out == f"why: {SHOWN}\\x0awarning: none\\x09here\n"
    assert captured.err == "host\\x0aerror: none\n"


def test_no_command_sends_what_others_wrote(store, terminal):
    one, two = (
        put_artifact(
            store, make_manifest("sft", run=HOSTILE, config={HOSTILE: n}, metrics={"a": n})
        )
        for n in (1, 2)
    )
    put_run(store, "tiny-1", one, profile=HOSTILE)
    put_run(store, "tiny-2", two, status="interrupted", overrides=(HOSTILE,))
    point(store, "main", "tiny-1")
    try_acquire(store, todays_shards(), replace(claim("b"), host=HOSTILE))
    for words in (
        *("ls", "ls tiny", "ls sft@tiny", "tag", "tag main", "compare tiny-1 tiny-2"),
        *(f"compare {one.name} {two.name}", "status tiny-1", "status tiny-2"),
    ):
        text = "\n".join(terminal.said(*words.split()))
        assert "tiny" in text or SHOWN in text
        assert is_harmless(text)
    point(store, "main", f"tiny-9{HOSTILE}")
    for words in ("ls main", f"tag best {one.name}"):
        assert is_harmless("".join(terminal.fails(*words.split())))
    query = f"select chr(27) || '[2J' as a, '{'x' * 500}' as b"
    (_, line) = terminal.said("sql", query)
    assert is_harmless(line)
    assert len(line) < 100


def test_a_report_is_printed_as_text(store, terminal, tmp_path):
    hostile, shown = HOSTILE.replace("\r", ""), SHOWN.replace("\\x0d", "")
    card = f"# Card\n\n\ttab\n{hostile}\n".encode()
    put_run(store, "tiny-1", publish_files(store, "report", {"report.md": card}, tmp_path))
    assert terminal.said("report", "tiny", "--markdown") == ["# Card", "", "\ttab", shown]


def test_text_gets_to_a_terminal_in_one_way():
    """Check that one file makes consoles of rich: `Display` escapes what it prints on them."""
    made = [
        path.relative_to(ROOT).as_posix()
        for folder in ("flows", "infra", "deployments")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))
    ]
    assert made == ["flows/cli/output.py"]
