"""Plans, compared with transcripts."""

from collections.abc import Callable

import pytest

from flows.plan.plan import Plan
from flows.plan.render import render
from tests.support.transcripts import Transcript


@pytest.fixture
def shows(transcript: Transcript) -> Callable[..., Plan]:
    """Compare the lines of a plan, or of some of its stages, with the transcript; return it."""

    def compare(plan: Plan, *stages: str) -> Plan:
        table, *texts = render(plan)
        lines = [*table.lines(), *texts]
        if stages:
            lines = [line for line in lines if line.split()[1:2] and line.split()[1] in stages]
        transcript.check(f"plan {' '.join(stages)}".rstrip(), "\n".join(lines))
        return plan

    return compare
