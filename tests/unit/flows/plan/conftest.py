"""Plans, compared with transcripts."""

from collections.abc import Callable

import pytest

from flows.plan.plan import Plan
from flows.plan.render import render
from flows.render.table import as_lines
from tests.support.transcripts import Transcript


@pytest.fixture
def shows(transcript: Transcript) -> Callable[..., Plan]:
    """Compare the lines of a plan, or of some of its stages, with the transcript; return it."""

    def compare(plan: Plan, *stages: str) -> Plan:
        lines = list(as_lines(render(plan)))
        if stages:
            lines = [line for line in lines if line.split()[1:2] and line.split()[1] in stages]
        transcript.check(f"plan {' '.join(stages)}".rstrip(), "\n".join(lines))
        return plan

    return compare
