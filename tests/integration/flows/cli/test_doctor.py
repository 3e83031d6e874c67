"""What the doctor asks other programs, and the whole command."""

import functools
import json
import stat

import pytest

from flows.cli import checks
from flows.cli.app import main


def test_an_interpreter_without_torch_is_reported_with_its_last_words(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no torch here' >&2\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (check,) = checks.check_torch(checks.ask_torch(str(python)))
    assert (check.state, check.found) == ("fail", "ModuleNotFoundError: no torch here")
    assert check.remedy


@pytest.mark.torch
def test_the_command_checks_everything_and_says_by_its_exit_code_whether_a_run_could_work(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(checks, "DISK_NEEDED", 0)
    monkeypatch.setattr(checks, "ask_torch", functools.cache(checks.ask_torch))  # a process
    words = ["doctor", "--home", str(tmp_path / "home")]

    assert main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in tree["checks"]]
    assert names[:11] == [
        *("python", "prefect", "sqlalchemy", "whenever", "fastapi", "torch", "bf16", "gpu"),
        *("cpu", "memory", "disk"),
    ]
    assert {"put", "delete", "server", "workers", "kernels", "trackers", "sandbox"} < {*names[11:]}
    assert bool(tree["profiles"]) == bool(tree["gpu"])
    assert main([*words, "--store", "file:///not/mounted/store"]) == 1
    said = capsys.readouterr().out
    assert "fail put        store file:///not/mounted/store cannot be reached" in said
    assert "hint: create that directory, or mount the disk it is on" in said
