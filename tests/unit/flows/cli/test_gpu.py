"""`doctor` of a GPU and `doctor --as`: what they print; the findings of tests are given."""

import json
from dataclasses import replace

import pytest

from flows.cli import checks, gpu
from flows.cli.app import main
from flows.cli.machine import doctor
from infra.storage.s3.probe import Finding
from nanochat_core.roofline import named_gpu

FINDINGS = (
    (Finding(name="device", state="ok", found="one"), {"gpu": "GPU Z", "memory": 8e10}),
    (Finding(name="speed", state="warn", found="slow"), {"read": 1e12, "bf16": 1e14}),
)


def test_what_each_profile_takes_on_a_card_is_printed(terminal):
    terminal.shows("doctor --as 4090")


def test_programs_get_the_same_numbers(terminal):
    tree = terminal.read("doctor", "--as", "h100")
    assert tree["gpu"] == "H100"
    assert tree["profiles"] == json.loads(json.dumps(gpu.forecast(named_gpu("h100"))))
    row = next(r for r in tree["profiles"] if (r["profile"], r["precision"]) == ("speedrun", "fp8"))
    assert row["dollars"] == pytest.approx(row["gpu_seconds"] / 3600 * 3.99)


def test_findings_come_as_they_are_made_and_an_unknown_gpu_is_forecast_as_measured(
    terminal, monkeypatch
):
    python = Finding(name="python", state="ok", found="3.11")
    monkeypatch.setattr(checks, "examine", lambda *_: iter([python]))
    monkeypatch.setattr(doctor, "count_gpus", lambda: 1)
    monkeypatch.setattr(gpu, "self_test", lambda: FINDINGS)
    terminal.shows("doctor")
    tree = terminal.read("doctor")
    assert [check["name"] for check in tree["checks"]] == ["python", "device", "speed"]
    assert {row["precision"] for row in tree["profiles"]} == {"bf16"}
    broken = replace(FINDINGS[0][0], state="fail")
    monkeypatch.setattr(gpu, "self_test", lambda: [(broken, {})])
    assert main(["doctor"]) == 1
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    assert main(["doctor"]) == 0


def test_a_known_gpu_is_forecast_by_its_data_sheet_and_own_memory():
    spec = gpu.measured_spec(
        {"gpu": "NVIDIA A100-SXM4-80GB", "memory": 7e10, "read": 1.0, "bf16": 1.0}
    )
    assert (spec.bf16, spec.memory) == (312e12, 7e10)
    assert gpu.measured_spec({"gpu": "GPU Z", "memory": 7e10}) is None
