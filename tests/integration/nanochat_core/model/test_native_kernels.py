"""The compiled training kernels against float64, and the same bits with any number of threads.

The kernels of the loss: test_loss.py.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from nanochat_core.model.attention import rotate_normalise
from nanochat_core.model.gpt import GPT
from nanochat_core.model.layers import Linear, mix_residual, relu_square, rms_norm
from nanochat_core.model.native import kernels, rows
from nanochat_core.scaling import numerics
from tests.support.nanochat_core.random_gpt import randomise, shape_of

REASON = kernels.LIBRARY.unable_here()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}"),
]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("rows", "inner", "cols"), [(1, 64, 64), (97, 300, 1100), (600, 64, 70), (13, 0, 7)]
)
def test_products_of_any_strides_are_those_of_float64(rows, inner, cols):
    a, b = random(rows, inner), random(inner, cols)
    for left in (a, a.T.contiguous().T, random(rows, 2 * inner)[:, ::2]):
        for right in (b, b.T.contiguous().T):
            exact = left.double() @ right.double()
            torch.set_num_threads(1)
            product = kernels.multiply(left, right)
            torch.testing.assert_close(product.double(), exact, rtol=0, atol=1e-4)
            torch.set_num_threads(3)
            assert torch.equal(kernels.multiply(left, right), product)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it():
    a, b = random(130, 300), random(300, 70)
    whole = kernels.multiply(a, b)
    assert torch.equal(kernels.multiply(a[77:], b), whole[77:])


def test_bf16_training_has_fp32_between_its_products_and_evaluation_bf16():
    config = shape_of(8, 32, num_heads=2, vocab_size=128)
    seen = []

    def note(module, given, out):
        seen.append((type(given[0].grad_fn).__name__, out.dtype))

    models = {p: randomise(GPT(config, numerics(p)), 1, 0.1).train() for p in ("fp32", "bf16")}
    model = models["bf16"]
    model.transformer.h[1].mlp.c_proj.register_forward_hook(note)
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(3))
    found = {p: m.summed_loss(tokens[:, :-1], tokens[:, 1:]) / 64 for p, m in models.items()}
    for loss in found.values():
        loss.backward()
    with torch.no_grad():
        model.summed_loss(tokens[:, :-1], tokens[:, 1:])
    assert seen == [("_ReluSquareBackward", torch.float32), ("NoneType", torch.bfloat16)]
    assert found["bf16"].item() == pytest.approx(found["fp32"].item(), abs=2e-3)
    exact = dict(models["fp32"].named_parameters())
    for name, parameter in model.named_parameters():
        if exact[name].grad.norm() > 1e-4:
            error = (parameter.grad.float() - exact[name].grad).norm() / exact[name].grad.norm()
            assert error < 0.03, name


def _rotary(positions, half):
    angles = random(positions, half)
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


def _like(rotary, x):
    cos, sin = rotary
    return cos.to(x.dtype), sin.to(x.dtype)


def _linear(x, weight):
    layer = Linear(96, 130)
    layer.dtype = x.dtype
    return functional_call(layer, {"weight": weight}, (x,))


COS_SIN = _rotary(70, 13)
ROW_KERNELS = {
    "norm": (lambda x: rms_norm(x, 1e-6), [(3, 300, 200)]),
    "norm-of-few": (lambda x: rms_norm(x, 1e-6), [(2, 5, 21)]),
    "relu-square": (relu_square, [(3, 300, 205)]),
    "linear": (_linear, [(2, 50, 96), (130, 96)]),
    "mix": (mix_residual, [(3, 300, 200), (3, 300, 200), (), ()]),
    "rotary": (lambda x: rotate_normalise(x, _like(COS_SIN, x), 1e-6, 1.2), [(30, 70, 3, 26)]),
}


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_passes_over_rows_and_their_gradients_are_those_of_float64(name):
    function, shapes = ROW_KERNELS[name]
    given = [random(*shape, 1).squeeze(-1) for shape in shapes]
    exact = [t.double().requires_grad_() for t in given]
    expected = function(*exact)
    # As attention returns it: the last dimension side by side, the others in another order.
    grad = random(*expected.shape[:-3], *expected.shape[-2:-4:-1], expected.size(-1))
    grad = grad.transpose(-3, -2)
    expected.backward(grad.double())
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        leaves = [t.clone().requires_grad_() for t in given]
        assert rows.usable(*leaves)
        out = function(*leaves)
        assert type(out.grad_fn).__name__.startswith("_")  # a class of ours, none of torch
        out.backward(grad)
        found.append([out, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for got, want in zip(found[0], [expected, *(t.grad for t in exact)], strict=True):
        bound = 1e-6 * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=0, atol=max(bound, 3e-6))


def test_relu_square_takes_nan_and_infinity_as_torch_does():
    x, grad = random(3, 21), random(3, 21)  # a vector or two of each row, and a rest
    x[0, 3] = x[0, 20] = float("nan")
    x[1, 0] = x[1, 19] = float("inf")
    grad[2] = float("inf")
    ours, torchs = (x.clone().requires_grad_() for _ in range(2))
    outs = relu_square(ours), F.relu(torchs).square()
    for out in outs:
        out.backward(grad)
    torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.grad, torchs.grad, rtol=0, atol=0, equal_nan=True)


WITHOUT_MEMORY_FOR_THREADS = """
import ctypes, resource, sys
library, (rows, width) = ctypes.CDLL(sys.argv[1]), (512, 512)
x = (ctypes.c_float * (rows * width))(*[3] * rows * width)
y = (ctypes.c_float * len(x))()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**20,) * 2)
library.nf_relu_square(3, ctypes.c_int64(rows), ctypes.c_int64(width), x, y)
print(set(y))
"""


def test_where_the_system_gives_no_thread_the_caller_does_the_work():
    command = [sys.executable, "-c", WITHOUT_MEMORY_FOR_THREADS, kernels.LIBRARY.load()._name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{9.0}\n"), done.stderr


def test_without_gradients_torch_computes():
    with torch.no_grad():
        assert not rows.usable(random(3, 64))
    assert not rows.usable(random(64, 3).T)
    assert not rows.usable(random(3, 64).to(torch.bfloat16))
