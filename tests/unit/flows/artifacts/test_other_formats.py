"""Files of a job in another format: its result, and the process that works on it."""

import json
from dataclasses import asdict

import pytest

from nanochat_core.errors import StageError
from nanochat_core.job import Result, write_json
from nanochat_core.runtime.process_start import ProcessRef, this_process


def test_a_result_of_the_format_before_is_read_and_a_later_one_refused(tmp_path):
    tree = {"format": 1, "status": "finished", "metrics": {"loss": 1.0}, "modules": ["tasks.kinds"]}
    write_json(tmp_path / "result.json", tree)
    found = Result.find(tmp_path)
    assert found == Result(status="finished", metrics={"loss": 1.0})

    found.write(tmp_path)
    again = json.loads((tmp_path / "result.json").read_text())
    assert again["format"] > 1
    write_json(tmp_path / "result.json", {**again, "format": again["format"] + 1})
    with pytest.raises(StageError, match="is not of format"):
        Result.find(tmp_path)


def test_a_file_that_names_a_process_in_another_format_names_none(tmp_path):
    path, me = tmp_path / "lock", this_process()
    with path.open("a") as file:
        me.write(file)
    assert ProcessRef.find(path) == me

    for text in ("", "[]", json.dumps(asdict(me)), json.dumps({"format": 2, **asdict(me)})):
        path.write_text(text)
        assert ProcessRef.find(path) is None
