"""For campaigns: today's seed, and a table of what they found."""

from collections.abc import Callable

import pytest

from tests.support.campaigns import Campaign, todays_seed


@pytest.fixture
def campaign(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Campaign:
    """Return the seed of the day, which is printed with the command that repeats the campaign."""
    seed = todays_seed()
    print(f"again: NANOCHAT_SEED={seed} .venv/bin/pytest '{request.node.nodeid}'")
    return Campaign(seed=seed, found=lambda what: record_property("found", what))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table with a row for each campaign, in the order they ran."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and report.nodeid.startswith("tests/campaigns/")
    ]
    if not reports:
        return
    lines = [f"| campaign, seed {todays_seed()} | ended | found | seconds |", "|---|---|---|---:|"]
    for report in sorted(reports, key=lambda report: report.start):
        name = report.nodeid.removeprefix("tests/campaigns/")
        found = dict(report.user_properties).get("found", "")
        lines.append(f"| {name} | {report.outcome} | {found} | {report.duration:.0f} |")
    paths = " ".join(terminalreporter.config.args)
    for line in [*lines, f"again: NANOCHAT_SEED={todays_seed()} .venv/bin/pytest {paths}"]:
        terminalreporter.write_line(line)
