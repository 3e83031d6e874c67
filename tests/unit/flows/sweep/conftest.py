"""Reports of sweeps, compared with transcripts."""

from collections.abc import Callable

import pytest

from flows.sweep.results import SweepReport
from tests.support.transcripts import Transcript


@pytest.fixture
def shows(transcript: Transcript) -> Callable[[SweepReport], SweepReport]:
    """Compare the table and the sentences of a report with the transcript; return the report."""

    def compare(found: SweepReport) -> SweepReport:
        lines = [*found.table.lines(), "", *found.sentences]
        transcript.check("report", "\n".join(lines))
        return found

    return compare
