"""`python -m tests.campaigns [GROUP]`: run a group of campaigns and record that it ran."""

import os
import sys
import time
from datetime import date

from tests.support.campaign_groups import (
    GROUPS,
    ROOT,
    TABLE,
    by_urgency,
    git,
    has_failed,
    read_rows,
    render,
    run_tests,
    with_row,
)
from tests.support.campaigns import todays_seed


def main(group: str = "") -> int:
    """Run the group, or the most urgent one whose tools are here; write its row; return 1 or 0."""
    if group and group not in GROUPS:
        print(f"error: no campaign is called {group!r}\nhint: one of {', '.join(GROUPS)}")
        return 2
    rows = read_rows(TABLE.read_text("utf-8"))
    for name in [group] if group else by_urgency(rows):
        again = f"NANOCHAT_SEED={todays_seed()} make campaign CAMPAIGN={name!r}"
        print(f"campaign {name!r}; again: {again}")
        started = time.monotonic()
        result = run_tests([f"tests/campaigns/{path}" for path in GROUPS[name]])
        if result is None:
            print(f"{name}: its tools are not on this machine; not recorded")
            continue
        commit = git("rev-parse", "--short=8", "HEAD")
        minutes = f"{(time.monotonic() - started) / 60:.0f}"
        today = date.today().isoformat()
        passed = rows[name][2] if has_failed(result) and name in rows else today
        row = [name, today, passed, commit, str(todays_seed()), minutes, result]
        if "NANOCHAT_TRIALS" in os.environ:
            print(f"{render(row)}\nnot recorded: NANOCHAT_TRIALS is set")
        else:
            TABLE.write_text(with_row(TABLE.read_text("utf-8"), row), "utf-8")
            print(f"{render(row)}\nwritten to {TABLE.relative_to(ROOT)}: commit it")
        return int(has_failed(result))
    return 1


sys.exit(main(*sys.argv[1:2]))
