"""The self-test of a GPU: it passes on a CPU, fails where a device computes wrongly, and what it
says follows from the device's properties, which are read in one place. No GPU runs it here."""

import sys
from types import SimpleNamespace

import pytest
import torch

from flows.cli import gpu
from nanochat_core import self_test
from nanochat_core.engine.native import runner as native_runner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.model import attention, attention_backends
from nanochat_core.model.attention_backends import SDPA

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def attention_is_left_as_it_was(monkeypatch):
    for name in ("_chosen", "_call"):
        monkeypatch.setattr(attention, name, getattr(attention, name))


@pytest.fixture
def gpu_is(monkeypatch):
    """gpu_is(major): the properties of a GPU that is not there."""

    def patch(major):
        more = {"minor": 0, "total_memory": 85_017_493_504, "multi_processor_count": 132}
        found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=major, **more)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
        return torch.device("cuda", 0)

    return patch


def test_a_cpu_passes_every_test(monkeypatch):
    monkeypatch.setattr(self_test, "read_bandwidth", lambda device, threads: 1e10)
    monkeypatch.setattr(self_test, "SMALL", 64)
    lines = {line.name: line for line in self_test.run_tests(CPU)}
    assert {name: line.state for name, line in lines.items()} == dict.fromkeys(lines, "ok")
    assert list(lines)[:3] == ["device", "attention", "fp8"]
    assert lines["attention"].found.startswith("sdpa for training and evaluation; not fa3: ")
    assert lines["graphs"].found == "there is no runner 'cuda graphs' for cpu"
    assert lines["speed"].values.keys() == {"read", "bf16", "fp8"}
    assert "0 of" not in lines["train fp8"].found


@pytest.mark.parametrize("fewer", [0, 1])
def test_attention_to_one_key_less_fails(fewer, monkeypatch):
    sdpa = SDPA.load()
    # The first gradient is the CPU's, the second the device's.
    ways = iter([sdpa, lambda q, k, v, window: sdpa(q, k, v, window - fewer)])
    monkeypatch.setattr(self_test, "choose", lambda *_: setattr(attention, "_call", next(ways)))
    assert self_test.training(CPU, "fp32").state == ("fail" if fewer else "ok")


def test_a_runner_that_answers_otherwise_fails(monkeypatch):
    monkeypatch.setattr(native_runner, "unable", lambda *_, **__: "not now")
    monkeypatch.setattr("nanochat_core.engine.runners.choose.unable", lambda *_, **__: "not now")
    assert self_test.decoding(CPU, "fp32").state == "ok"
    prefill = TorchRunner.prefill
    monkeypatch.setattr(TorchRunner, "prefill", lambda *args: -prefill(*args))
    line = self_test.decoding(CPU, "bf16")
    assert line.state == "fail"
    assert line.remedy == "do not serve from here"


def test_a_test_that_raises_hides_no_other(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(self_test, "TOLERANCES", {})
    for name in ("decoding", "speeds", "attention"):
        monkeypatch.setattr(self_test, name, broken)
    lines = list(self_test.run_tests(CPU))
    assert [line.state for line in lines] == ["ok", "fail", "ok", "fail", "fail", "fail", "fail"]
    assert lines[1].found == "RuntimeError: no kernel image"


def test_what_is_said_follows_from_the_properties(gpu_is):
    found = self_test.read_device(gpu_is(9))
    line = self_test.describe(found)
    assert line.found.startswith("NVIDIA H100 80GB HBM3, compute capability 9.0, 132 processors")
    assert line.values == {"gpu": found.name, "memory": found.memory}


def test_what_is_said_follows_from_the_card_and_from_the_backends_that_compute_right(
    gpu_is, monkeypatch, transcript
):
    every = {backend.name for backend in attention_backends.BACKENDS}
    plain = {name for name in every if not name.startswith("fa")}
    cards = [*((9, {name} - {""}) for name in ("cudnn", "flex", "varlen", ""))]
    missing, failing = "its package is missing", "RuntimeError on a small problem: no kernel image"
    cases = [(*case, missing) for case in (*cards, (8, plain), (10, plain), (8, every))]
    for major, right, reason in (*cases, (9, {"sdpa"}, failing)):
        device = gpu_is(major)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))

        def fault(backend, device, dtype, right=right, reason=reason):
            return None if backend.name in right else reason

        monkeypatch.setattr(attention_backends.Backend, "_fault", fault)
        line = self_test.attention(device, self_test.read_device(device))
        for kind, said in (("attention", line), ("fp8", self_test.fp8(device))):
            head = f"{kind} of compute capability {major}.0 with {sorted(right)}; {reason}"
            transcript.check(head, f"{said.state}: {said.found}\nremedy: {said.remedy}")


def test_a_slow_gpu_is_named(monkeypatch):
    monkeypatch.setattr(self_test, "read_bandwidth", lambda device, threads: 3e12)
    monkeypatch.setattr(self_test, "product_flops", lambda kind, *_: 4e14)
    device = self_test.Device(name="NVIDIA H100", capability=(9, 0), memory=1, processors=1)
    line = self_test.speeds(CPU, device)
    assert line.state == "warn"
    assert "bf16 400 TFLOP/s (40% of the data sheet)" in line.found
    assert line.values == {"read": 3e12, "bf16": 4e14, "fp8": 4e14}


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("", None),
        ("sys.exit('out of luck')", "ended with 1: out of luck"),
        ("os.kill(os.getpid(), 9)", "ended with -9: no output"),
    ],
)
def test_the_command_line_gets_each_finding_and_why_the_test_died(end, found):
    line = '{"name": "device", "state": "ok", "found": "a GPU", "remedy": null, "values": {"a": 1}}'
    code = f"import os, sys; print({line!r}, flush=True); {end}"
    lines = list(gpu.self_test((sys.executable, "-c", code)))
    (first, values), *rest = lines
    assert (first.name, first.found, values) == ("device", "a GPU", {"a": 1})
    assert [finding.found for finding, _ in rest] == ([] if found is None else [found])


def test_a_test_that_hangs_is_ended():
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    ((finding, _),) = gpu.self_test(command, timeout=0.1)
    assert finding.found == "ended with -9: no output"
