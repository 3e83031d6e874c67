"""The step that runs the tests for a GPU, where pytest does not start."""

import subprocess
import sys

import pytest

from bench.gpu.gpu_tests import main


def test_the_reason_is_the_last_line_if_pytest_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = 'Error importing plugin "xdist"'
    done = subprocess.CompletedProcess([], 4, stdout="", stderr=reason)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(sys, "argv", ["gpu_tests"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].strip() == reason
