"""The bench of large stores, with a small one."""

import sys

import pytest

import bench.scale


def test_each_command_is_measured_in_a_store_that_has_what_the_plan_looks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--artifacts", "15", "--runs", "3", "--rounds", "1", "--prefect-runs", "0"]
    monkeypatch.setattr(sys, "argv", ["scale", *words])
    asked: list[str] = []
    run_command = bench.scale.run_command

    def note(home: object, *words: str) -> bench.scale.Cost:
        asked.append(" ".join(words))
        return run_command(home, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.scale, "run_command", note)
    bench.scale.main()
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("; 28 artifacts, 3 runs")
    assert columns.split() == ["command", "CPU", "s", "wall", "s"]
    names = ["plan tiny", "ls", "status", "status tiny", "gc, first time", "gc, second time"]
    assert [row[:20].rstrip() for row in rows] == names
    assert all(float(row.split()[-2]) > 0 for row in rows)
    # Each command ended with 0, so that nothing is left to build.
    assert {words.split()[0] for words in asked} == {"plan", "ls", "status", "gc"}
    assert all("--exit-code" in words for words in asked if words.startswith("plan"))
