"""The whole product through Prefect's HTTP API, on a fresh home.

By hand, with a table of what was checked: python -m tests.campaigns.end_to_end
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.end_to_end.diary import Diary
from tests.campaigns.end_to_end.stack import Stack
from tests.campaigns.end_to_end.walk import walk

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(3600)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(home=tmp_path / "home", port=4700)
    yield stack
    stack.end()


def test_up_form_cancel_failure_retry_schedule_fetch_and_down(stack: Stack) -> None:
    walk(stack, Diary())
