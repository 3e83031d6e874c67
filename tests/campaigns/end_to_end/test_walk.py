"""The whole product through Prefect's HTTP API, on a fresh home.

By hand, with a table of what was checked: python -m tests.campaigns.end_to_end
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.end_to_end.diary import Diary
from tests.campaigns.end_to_end.walk import walk
from tests.support.infra.stack.live import LiveStack

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(3600)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path / "home", port=4700)
    yield stack
    stack.end()


def test_up_form_cancel_failure_retry_schedule_fetch_and_down(stack: LiveStack) -> None:
    walk(stack, Diary())
