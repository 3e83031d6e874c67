"""A short round of the campaign of mutated model directories, and what it must notice."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.campaigns.security.model import try_all

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_mutated_model_directories_give_one_line_or_the_right_answer(tmp_path: Path) -> None:
    assert try_all(tmp_path, attempts=300, seed=1) == []


def test_a_crash_a_traceback_a_hang_and_a_wrong_answer_are_seen(tmp_path: Path) -> None:
    trials = (os.abort, lambda: time.sleep(60), lambda: [][0], lambda: None)

    def trial(directory: Path, rng: object) -> None:
        n = len(list(tmp_path.glob("seen-*")))
        (tmp_path / f"seen-{n}").touch()
        trials[n]()

    found = try_all(tmp_path, attempts=4, seed=1, trial=trial, seconds=5.0)
    assert [line.rpartition(": ")[2] for line in found] == [
        "ended the process by SIGABRT",
        "ended the process by SIGALRM",
        "list index out of range",
    ]
