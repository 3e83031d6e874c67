"""Every backend that can run here against a mask written out in float64, at window edges."""

import dataclasses
import math
import sys
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.model import attention
from nanochat_core.model.attention import attend, attention_backend, choose
from nanochat_core.model.attention_backends import (
    BACKENDS,
    SDPA,
    Backend,
    difference,
    load_varlen,
)
from nanochat_core.runtime.hardware.distributed import World

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
# Rows shorter and longer than a block of queries; windows at, one below and one above its size.
LENGTHS_AND_WINDOWS = [
    *((1, 5), (7, 0), (7, 1), (100, 99), (100, 98), (128, 127), (129, 128), (384, 256)),
    *((300, window) for window in (127, 128, 129, 298, 299, 5000)),
]


def problem(length, *, head_dim=16):
    """q, k, v and the output's gradient; 4 query heads, 2 key/value heads."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads, head_dim) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def written_out(q, k, v, window):
    """Scores of every pair, all but the W + 1 keys up to the query's own set to minus infinity."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.size(2) // k.size(2), dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.size(-1))
    length = range(q.size(1))
    hidden = [[not query - window <= key <= query for key in length] for query in length]
    scores = scores.masked_fill(torch.tensor(hidden), -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def results(call, q, k, v, grad, window):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = call(*leaves, window)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize(("length", "window"), LENGTHS_AND_WINDOWS)
def test_sdpa_sees_w_plus_one_keys_and_its_gradients_too(length, window):
    q, k, v, grad = problem(length)
    expected = results(written_out, q, k, v, grad, window)

    def call(q, k, v, window):
        return attend(q, k, v, window=window)

    for got, want in zip(results(call, q, k, v, grad, window), expected, strict=True):
        torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("length", "window"), [(384, 100), (384, 127), (384, 128), (384, 383)])
def test_a_backend_on_a_gpu_sees_w_plus_one_keys(backend, length, window):
    device = torch.device("cuda")
    reason = backend.unable(device, torch.bfloat16)
    if reason is not None:
        pytest.skip(f"{backend.name}: {reason}")
    narrow = [t.to(device, torch.bfloat16) for t in problem(length, head_dim=128)]
    expected = results(written_out, *(t.cpu() for t in narrow), window)
    for got, want in zip(results(backend.load(), *narrow, window), expected, strict=True):
        bound = 0.02 * want.abs().max().item()
        torch.testing.assert_close(got.cpu().double(), want.double(), atol=bound, rtol=0)


@pytest.fixture(autouse=True)
def _back_to_sdpa():
    yield
    choose("sdpa", CPU, torch.float32)


@pytest.mark.gpu
def test_auto_on_a_hopper_gpu_is_faster_than_sdpa():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no GPU of compute capability 9 here")
    device = torch.device("cuda")
    reasons = {b.name: b.unable(device, torch.bfloat16) for b in BACKENDS}
    assert choose("auto", device, torch.bfloat16) is not SDPA, reasons


def test_a_backend_that_cannot_run_is_refused_with_its_reason(transcript):
    def choose_by(name, strict):
        choose(name, CPU, torch.bfloat16, strict=strict)

    for name in ("fa3", "fa9"):
        transcript.refused(name, ConfigError, choose_by, name, False)
    for name in ("fa2", "fa3", "fa4", "cudnn", "varlen"):  # they add up in any order
        transcript.refused(f"{name}, strict", ConfigError, choose_by, name, True)
    assert attention_backend() == "sdpa"


def with_load(load):
    return Backend(name="mine", capabilities=(), dtypes=(torch.float32,), load=load)


def too_narrow(q, k, v, window):
    return SDPA.load()(q, k, v, window - 1)  # counts keys where it should count distance


def missing():
    raise ImportError("No module named 'mine'")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: too_narrow, "its o at window 100 is off by"),
        (missing, "its package is missing: No module named 'mine'"),
        (lambda: lambda *_: 1 / 0, "ZeroDivisionError on a small problem"),
    ],
    ids=["wrong", "missing", "failing"],
)
def test_auto_passes_over_what_fails_or_computes_something_else(load, reason, monkeypatch):
    backend = with_load(load)
    monkeypatch.setattr(attention, "BACKENDS", (backend, SDPA))
    assert choose("auto", CPU, torch.float32) is SDPA
    with pytest.raises(ConfigError, match=reason):
        choose("mine", CPU, torch.float32)


def test_auto_takes_the_first_that_works(monkeypatch):
    backend = with_load(SDPA.load)
    monkeypatch.setattr(attention, "BACKENDS", (backend, SDPA))
    assert choose("auto", CPU, torch.float32) is backend
    assert attention_backend() == "mine"
    q, k, v, _ = problem(50)
    torch.testing.assert_close(attend(q, k, v, window=3), SDPA.load()(q, k, v, 3))


def test_strict_leaves_auto_what_repeats_itself(monkeypatch):
    assert [backend.name for backend in BACKENDS if backend.repeats] == ["flex", "sdpa"]
    able = [dataclasses.replace(b, capabilities=(), load=SDPA.load) for b in BACKENDS]
    monkeypatch.setattr(attention, "BACKENDS", able)
    assert choose("auto", CPU, torch.bfloat16).name == "fa3"
    assert choose("auto", CPU, torch.bfloat16, strict=True).name == "flex"


class OfTwo(World):
    """A world in which the other rank gives the same reasons, and those of `others`."""

    others: ClassVar[list[str | None]]

    def first_text(self, text):
        return text or self.others.pop(0)


def test_a_backend_that_fails_on_another_rank_is_taken_by_none(monkeypatch):
    world = OfTwo(rank=0, local_rank=0, size=2)
    monkeypatch.setattr(attention, "BACKENDS", (with_load(SDPA.load), SDPA))
    OfTwo.others = ["its package is missing: mine (rank 1)", None]
    assert choose("auto", CPU, torch.float32, world=world) is SDPA
    OfTwo.others = ["its package is missing: mine (rank 1)"]
    with pytest.raises(ConfigError, match=r"run here: its package is missing: mine \(rank 1"):
        choose("mine", CPU, torch.float32, world=world)


def test_a_wrong_gradient_alone_is_noticed():
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.1 * grad

    def call(q, k, v, window):
        return SDPA.load()(q, Off.apply(k), v, window)

    reason = difference(call, CPU, torch.float32)
    assert reason.startswith("its dk at window 100 is off by")


def _flash_attention(unlimited, q, k, v, *, causal, window_size):
    """Compute what the packages document: the keys to the left, without the query's own."""
    assert causal
    left, right = window_size
    assert (left == right == unlimited) or right == 0
    return written_out(q, k, v, q.size(1) if left == unlimited else left), None


FLASH = {
    "fa2": ("flash_attn", -1),
    "fa3": ("flash_attn_interface", -1),
    "fa4": ("flash_attn.cute", None),
}


@pytest.mark.parametrize("name", ["flex", *FLASH, "varlen"])
@pytest.mark.parametrize(("length", "window"), [c for c in LENGTHS_AND_WINDOWS if c[0] >= 100])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own
def test_each_backend_gets_the_window_as_it_counts_it(name, length, window, monkeypatch):
    if name in FLASH:
        module, unlimited = FLASH[name]
        for parent in ("flash_attn", module):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        sys.modules[module].flash_attn_func = partial(_flash_attention, unlimited)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _of_sequences)
    call = next(backend for backend in BACKENDS if backend.name == name).load()
    q, k, v, _ = problem(length)
    got = call(q, k, v, min(window, length - 1))
    torch.testing.assert_close(got.double(), written_out(q, k, v, window), atol=2e-5, rtol=1e-5)


def _of_sequences(q, k, v, ends, _, *lengths, window_size):
    """What torch documents of `varlen_attn`, written out: -1 is no limit."""
    assert ends.dtype == torch.int32
    assert set(lengths) == set(ends.diff().tolist())
    left, right = window_size
    assert right == 0
    rows = []
    for first, last in pairwise(ends.tolist()):
        one = [t[None, first:last] for t in (q, k, v)]
        rows.append(written_out(*one, last - first if left < 0 else left)[0])
    return torch.cat(rows)


def test_torchs_flash_attention_takes_these_arguments_and_has_gradients():
    # On meta tensors torch checks the call and computes the shapes alone.
    shapes = [(2, 50, heads, 32) for heads in (4, 2, 2)]
    leaves = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    for window in (10, 49):
        mixed = load_varlen()(*leaves, window)
        assert mixed.shape == leaves[0].shape
        gradients = torch.autograd.grad(mixed.sum(), leaves)
        assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
