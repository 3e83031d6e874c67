"""Which runner is chosen, and the memory it is said to take."""

import dataclasses
import gc
import importlib.metadata
import re
import weakref
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from nanochat_core.engine.native.runner import NativeRunner
from nanochat_core.engine.runners import choose as runners
from nanochat_core.engine.runners.choose import choose_runner, open_runner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.speed import make_endless
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.versions import versions_in_use
from nanochat_core.scaling import model_for_depth, numerics
from tests.support.nanochat_core.engine.native_models import needs_kernels
from tests.support.nanochat_core.engine.torch_slots import matrices_of

pytestmark = pytest.mark.torch

GB = 10**9


def zeros(depth, precision="fp32"):
    """Return a model without random weights, which take seconds."""
    model = GPT(model_for_depth(depth), numerics(precision))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_runner_and_the_memory_reported_are_those_taken(precision):
    model = zeros(4)
    output = []
    settings = {"precision": precision, "num_slots": 3, "max_len": 64, "runner": "torch"}
    runner = open_runner(model, stop_tokens=[], on_choice=output.append, **settings)
    assert isinstance(runner, TorchRunner)
    [choice] = output
    assert choice.groups == runner.groups
    versions = versions_in_use()
    assert versions["runner"] == f"torch in {precision}"
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    pages = [t for pool in runner.pools for t in (pool.keys, pool.values)]
    assert choice.pool_bytes == sum(t.numel() * t.element_size() for t in pages)
    weights = runner.weights
    tables = [w.value_embed for w in weights.layers if w.value_embed is not None]
    own = [t for t in (weights.embed, *tables) if t is weights.embed or t.dtype != model.dtype]
    taken = sum(t.numel() * t.element_size() for t in (*matrices_of(runner), *own))
    assert choice.weight_bytes == pytest.approx(taken, rel=0.02)


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_native_runners_own_copies_of_tables_are_reported(precision):
    model = zeros(2, precision)  # in its own precision no table is cast
    choice = choose_runner(model, precision=precision, num_slots=1)
    runner = open_runner(model, stop_tokens=[], precision=precision, num_slots=1, max_len=16)
    assert isinstance(runner, NativeRunner)
    weights = runner._weights
    matrices = [
        matrix.data
        for layer in weights.layers
        for matrix in (layer.qkv, layer.attention_out, layer.fc, layer.mlp_out)
    ]
    tables = [layer.value_embed for layer in weights.layers if layer.value_embed is not None]
    stored = (*matrices, weights.lm_head.data, weights.embedding, *tables)
    assert choice.weight_bytes == pytest.approx(sum(t.nbytes for t in stored), rel=0.02)


def test_tables_of_positions_that_do_not_fit_are_refused_before_they_are_made():
    shape = model_for_depth(4)
    long = dataclasses.replace(shape, sequence_len=2**20, windows=(16,) * shape.depth)
    with pytest.raises(ConfigError, match="a sequence of 1048576 tokens and the weights"):
        choose_runner(GPT(long, numerics("fp32")), num_slots=1, runner="torch", memory=GB)


def test_with_less_memory_fewer_sequences_fit_and_with_too_little_it_is_refused():
    model = GPT(model_for_depth(4), numerics("fp32"))
    ample = choose_runner(model, num_slots=8, runner="torch", memory=100 * GB)
    assert [g.num_pages for g in ample.groups] == [1 + 8 * 66, 1 + 8 * 128]
    half = choose_runner(
        model, num_slots=8, runner="torch", memory=ample.weight_bytes + ample.pool_bytes // 2
    )
    assert half.weight_bytes + half.pool_bytes <= ample.weight_bytes + ample.pool_bytes // 2
    assert [g.num_pages for g in half.groups] == [1 + 3 * 66, 1 + 3 * 128]
    with pytest.raises(
        ConfigError, match=r"2048 tokens and the weights in fp32 take 92\.6 MB"
    ) as e:
        choose_runner(model, num_slots=8, runner="torch", memory=ample.weight_bytes)
    assert "79.7 MB are available" in str(e.value)
    assert e.value.hint is not None


@pytest.mark.parametrize(("max_len", "most"), [(64, 512), (516, 512), (700, 512), (2048, 4096)])
def test_one_slots_pages_do_not_make_it_read_in_crumbs(max_len, most, monkeypatch):
    monkeypatch.setitem(runners.PREFILL_TOKENS, "cpu", most)
    runner = open_runner(zeros(4), stop_tokens=(), num_slots=1, max_len=max_len, runner="torch")
    scheduler = make_endless(runner, context=max_len)
    assert scheduler.slots.prefill_tokens >= min(most, max_len)


def test_nothing_is_allocated_to_refuse(monkeypatch):
    with torch.device("meta"):
        model = GPT(model_for_depth(24), numerics("bf16"))
    monkeypatch.setattr(runners, "available_memory", lambda device: GB)
    monkeypatch.setattr(torch, "zeros", None)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(ConfigError, match="are available"):
        open_runner(model, stop_tokens=[], runner="torch")


def test_a_containers_limit_is_what_there_is_a_share_of(monkeypatch):
    model = GPT(model_for_depth(4), numerics("fp32"))
    monkeypatch.setattr(runners, "memory_left", lambda: 4 * 10**6)
    with pytest.raises(ConfigError, match=r"1 MB are available"):
        choose_runner(model, runner="torch")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"precision": "fp16"}, "no precision 'fp16'"),
        ({"runner": "fast"}, "no runner 'fast'"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"precision": "int8", "runner": "torch"}, "not torch: it has no int8"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_with_a_hint_or_the_number(make_model, settings, error):
    with pytest.raises(ConfigError, match=error):
        choose_runner(make_model(), **settings)


def test_without_kernels_torch_is_chosen_and_the_reason_is_reported(make_model, monkeypatch):
    monkeypatch.setattr(runners, "unable", lambda *_, **__: "there is no C++ compiler")
    choice = choose_runner(make_model(), num_slots=2)
    assert (choice.runner, choice.reason) == ("torch", "not native: there is no C++ compiler")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler.*no int8"):
        choose_runner(make_model(), num_slots=2, precision="int8")


class Refused(Exception):
    """As Triton's compiler raises."""


class Refusing:
    """A GPU's runner whose opening fails, with a cycle of objects, as that of graphs is."""

    failures: ClassVar[dict[bool, Exception]] = {}  # with Triton's kernels or not -> what is raised
    opened: ClassVar[list["weakref.ref[Refusing]"]] = []
    alive: ClassVar[list[int]] = []  # of those that failed, whenever one is opened

    def __init__(self, *_args, kernels, **_settings):
        self.alive.append(sum(runner() is not None for runner in self.opened))
        self.itself = self
        self.opened.append(weakref.ref(self))
        if error := self.failures.get(kernels):
            raise type(error)(*error.args)  # another one each time: it holds what was on the stack


@pytest.fixture
def failures(monkeypatch):
    """A choice as on a GPU, of `triton` unless one is asked for, and a GPU that refuses."""
    choose = runners.choose_runner

    def choose_graphs(model, **settings):
        runner = settings.get("runner") or "triton"
        return replace(choose(model, **settings | {"runner": "torch"}), runner=runner)

    error = RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")
    found = {True: Refused("no such instruction"), False: error}
    monkeypatch.setattr(Refusing, "failures", found)
    monkeypatch.setattr(Refusing, "opened", [])
    monkeypatch.setattr(Refusing, "alive", [])
    monkeypatch.setattr(runners, "choose_runner", choose_graphs)
    monkeypatch.setattr(runners, "DeviceRunner", Refusing)
    return found


NOT_TRITON = "not triton: it cannot capture a step: Refused: no such instruction"
NOT_GRAPHS = (
    "not cuda graphs: it cannot capture a step: RuntimeError: CUDA error: operation not permitted"
)


@pytest.mark.parametrize(
    ("runner", "reason"),
    [("torch", f"{NOT_TRITON}; {NOT_GRAPHS}"), ("cuda graphs", NOT_TRITON)],
)
def test_where_a_runner_cannot_be_opened_the_next_runs_the_model_and_says_why(
    make_model, failures, runner, reason
):
    if runner == "cuda graphs":
        del failures[False]
    output, stops = [], iter([5])
    gc.disable()  # the failed one's memory is needed at once
    try:
        opened = open_runner(make_model(), stop_tokens=stops, num_slots=2, on_choice=output.append)
    finally:
        gc.enable()
    assert type(opened) is (TorchRunner if runner == "torch" else Refusing)
    assert runner != "torch" or opened.stop_tokens == {5}
    assert Refusing.alive == [0, 0]
    assert [(c.runner, c.reason) for c in output] == [(runner, reason)]


@pytest.mark.parametrize("error", [AssertionError("a fault of ours"), KeyError("of ours")])
def test_a_fault_of_ours_is_raised(make_model, failures, error):
    failures[False] = error
    if isinstance(error, AssertionError):
        failures[True] = error
    with pytest.raises(type(error), match="of ours"):
        open_runner(make_model(), stop_tokens=[], num_slots=2)


@pytest.mark.parametrize(("runner", "why"), [("triton", "instruct"), ("cuda graphs", "permitted")])
def test_a_runner_that_was_asked_for_by_name_is_an_error(make_model, failures, runner, why):
    with pytest.raises(ConfigError, match=f"{runner} cannot run here: .*{why}") as e:
        open_runner(make_model(), stop_tokens=[], num_slots=2, runner=runner)
    assert e.value.hint is not None


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), "triton"), ((8, 6), "cuda graphs")])
def test_a_gpu_that_has_run_the_kernels_takes_them_first(
    make_model, monkeypatch, capability, chosen
):
    monkeypatch.setitem(runners.RUNNERS, "cpu", runners.RUNNERS["cuda"])
    monkeypatch.setattr(runners, "_unable", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_runner(make_model(), num_slots=1).runner == chosen
    assert choose_runner(make_model(), num_slots=1, runner="triton").runner == "triton"


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_kernels_are_chosen_where_they_run_and_noted_for_the_manifest(make_model, precision):
    output = []
    settings = {"precision": precision, "num_slots": 2, "memory": GB}
    runner = open_runner(make_model(), stop_tokens=[], on_choice=output.append, **settings)
    assert isinstance(runner, NativeRunner)
    assert [(c.runner, c.reason) for c in output] == [("native", "the fastest here")]
    versions = versions_in_use()
    assert versions["runner"] == f"native in {precision}"
    assert re.search(r"\d+\.\d+", versions["compiler"])
