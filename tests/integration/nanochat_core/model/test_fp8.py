"""fp8 products against their formulas in float64, and when a weight is quantised again."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from nanochat_core.model import fp8
from nanochat_core.model.fp8 import E4M3, E5M2, Quantised, is_eligible, quantise
from nanochat_core.model.gpt import GPT
from nanochat_core.model.layers import rms_norm
from nanochat_core.model.loss import softcap_loss
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import numerics, run_for_depth
from tests.support.nanochat_core.random_gpt import shape_of

pytestmark = pytest.mark.torch


def quantised(*weights):
    copies = [Quantised(weight) for weight in weights]
    for copy in copies:
        copy.refresh()
    return copies


CONFIG = shape_of(8, 32, width=128, num_heads=2, vocab_size=256)


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_the_largest_value_becomes_the_largest_that_fp8_has(dtype, largest):
    x = random(64, 32)
    values, unit = quantise(x, dtype)
    assert values.float().abs().max() == largest
    assert unit.dtype == torch.float32
    assert float(unit) == pytest.approx(x.abs().max().item() / largest, rel=1e-6)
    steps = {E4M3: 2**-4, E5M2: 2**-3}[dtype]  # half the distance of neighbours, of the value
    error = (values.double() * unit.double() - x.double()).abs()
    smallest = {E4M3: 2**-9, E5M2: 2**-16}[dtype] * unit.double()
    assert (error <= steps * x.double().abs() + smallest).all()


def test_zeros_and_infinities_stay_numbers_where_they_can():
    values, unit = quantise(torch.zeros(4, 4), E4M3)
    assert not values.float().any()
    assert torch.isfinite(unit)
    values, _ = quantise(torch.tensor([1e-30, -1e-30]), E5M2)
    assert torch.isfinite(values.float()).all()


def dequantised(x, dtype):
    """What is left of x, written out: division in float64, clamped, rounded, scaled back."""
    largest = torch.finfo(dtype).max
    scale = (largest / max(x.abs().max().double().item(), 1e-12),)
    scaled = (x.float() * torch.tensor(scale)).clamp(-largest, largest).to(dtype)
    return scaled.double() / torch.tensor(scale).double()


@pytest.mark.parametrize("in_fp8", [True, False], ids=["dw-fp8", "dw-bf16"])
def test_products_of_one_input_and_their_gradients_are_the_formulas(in_fp8, monkeypatch):
    monkeypatch.setattr(fp8, "WEIGHT_GRADIENT_IN_FP8", in_fp8)
    x = random(3, 16, 128).bfloat16().requires_grad_()
    weights = [torch.nn.Parameter(random(256, 128, seed=seed)) for seed in (2, 5)]
    grads = random(2, 3, 16, 256, seed=3).bfloat16()
    outs = fp8.linears(x, weights, quantised(*weights))
    torch.autograd.backward(outs, list(grads))
    flat, of_input = x.detach().flatten(0, 1), 0
    xs = dequantised(flat, E4M3)
    for out, weight, grad in zip(outs, weights, grads.flatten(1, 2), strict=True):
        ws, gs = dequantised(weight.detach(), E4M3), dequantised(grad, E5M2)
        of_input = of_input + gs @ ws
        expected_dw = gs.T @ xs if in_fp8 else grad.double().T @ flat.double()
        assert out.dtype == torch.bfloat16
        assert_rounded(out.detach().flatten(0, 1), xs @ ws.T)
        assert_rounded(weight.grad, expected_dw)
    assert_rounded(x.grad.flatten(0, 1), of_input)


def assert_rounded(got, want):
    """Assert that bf16 rounds the result, or each of its two terms, and nothing else differs."""
    bound = 0.005 * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, atol=bound, rtol=0.004)


@pytest.mark.parametrize(("sums", "fast"), [("exact", 1), ("fast", 2)])
def test_gradients_sum_in_fp32_but_those_of_inputs_if_asked_otherwise(sums, fast, monkeypatch):
    product, asked = torch._scaled_mm, []

    def scaled_mm(*args, use_fast_accum, **named):
        asked.append(use_fast_accum)
        return product(*args, use_fast_accum=use_fast_accum, **named)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    model = GPT(CONFIG, dataclasses.replace(numerics("fp8"), fp8_sums=sums))
    model.init_weights(1)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    model.summed_loss(tokens, tokens).backward()
    # Each of 13 matrices: output, input's gradient, its own gradient, which is never fast.
    assert len(asked) == 3 * 13
    assert sum(asked) == fast * 13


@pytest.mark.parametrize(
    ("shape", "eligible"),
    [((128, 128), True), ((2048, 256), True), ((112, 256), False), ((136, 256), False)],
)
def test_only_matrices_worth_it_are_eligible(shape, eligible):
    assert is_eligible(torch.empty(shape)) is eligible


def test_scales_from_bounds_lose_little_beside_those_from_the_largest_value():
    # Activations of norm sqrt(C), a few large, and tokens whose gradients differ in size.
    x = (random(64, 256) * random(64, 256, seed=2).exp()).bfloat16()
    x = rms_norm(x, 0.0).requires_grad_()
    up, down = (torch.nn.Parameter(0.05 * random(*s)) for s in ((1024, 256), (256, 1024)))
    grad = (1e-7 * random(64, 256, seed=3) * random(64, 1, seed=4).exp()).bfloat16()
    copies = quantised(up, down)

    def errors(out):
        found = [out.detach(), *torch.autograd.grad(out, (x, up, down), grad)]
        return [
            float((got - want).norm() / want.norm()) for got, want in zip(found, exact, strict=True)
        ]

    leaves = [t.detach().double().requires_grad_() for t in (x, up, down)]
    out = F.linear(F.relu(F.linear(leaves[0], leaves[1])).square(), leaves[2])
    exact = [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
    from_bounds = errors(fp8.mlp(x, up, down, copies))
    (hidden,) = fp8.linears(x, [up], [copies[0]])
    from_amax = errors(fp8.linears(F.relu(hidden).square(), [down], [copies[1]])[0])
    for bound, amax in zip(from_bounds, from_amax, strict=True):
        assert bound < 0.12
        assert bound < 1.2 * amax


def test_a_bound_of_the_mlp_is_never_exceeded(monkeypatch):
    # The largest that Cauchy-Schwarz allows: one token along one row of each matrix.
    seen = []

    def counted(x, dtype, bound=None):
        if bound is not None:
            seen.append((float(x.abs().max()), float(bound)))
        return quantise(x, dtype, bound)

    monkeypatch.setattr(fp8, "quantise", counted)
    up, down = (torch.nn.Parameter(random(*s)) for s in ((256, 128), (128, 256)))
    copies = quantised(up, down)
    row = up.detach().norm(dim=1).argmax()
    x = rms_norm(up.detach()[row], 0.0).expand(16, 128).bfloat16().requires_grad_()
    fp8.mlp(x, up, down, copies).backward(down.detach()[:, row].expand(16, 128).bfloat16())
    assert len(seen) == 3
    for largest, bound in seen:
        assert largest < 1.1 * bound  # fp8 and bf16 round; what exceeds it is clamped


def model_of(precision, config=CONFIG, scales="amax"):
    model = GPT(config, dataclasses.replace(numerics(precision), fp8_scales=scales))
    model.init_weights(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight") or name == "lm_head.weight":
                parameter.copy_(0.05 * random(*parameter.shape, seed=len(name)))
    return model


def rows():
    generator = torch.Generator().manual_seed(4)
    return torch.randint(CONFIG.vocab_size, (2, 33), generator=generator)


def gradients(model):
    tokens = rows()
    model.zero_grad()
    (model.summed_loss(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def test_gates_stay_in_bf16_and_lm_head_is_quantised():
    model = model_of("fp8")
    gradients(model)
    matrices = {n for n, m in model.named_modules() if getattr(m, "quantised", None) is not None}
    blocks = {"attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    expected = {f"transformer.h.{i}.{name}" for i in range(2) for name in blocks}
    assert matrices == expected | {"lm_head"}
    assert not any("quantised" in name for name in model.state_dict())


def test_training_in_fp8_is_near_bf16_repeats_itself_and_depends_on_the_scales():
    wide, found = gradients(model_of("bf16")), {}
    for scales in ("amax", "bound"):
        model = model_of("fp8", scales=scales)
        narrow, again = gradients(model), gradients(model)
        assert narrow.keys() == wide.keys()
        assert all(torch.equal(narrow[name], again[name]) for name in narrow)
        for name in ("lm_head.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"):
            difference = (narrow[name] - wide[name]).norm() / wide[name].norm()
            assert 0 < difference < 0.15, name
        found[scales] = narrow
    for name in ("lm_head.weight", "transformer.h.0.mlp.c_fc.weight"):
        assert not torch.equal(found["amax"][name], found["bound"][name]), name


@pytest.mark.parametrize("scales", ["amax", "bound"])
def test_rows_without_a_token_to_learn_from_cost_nothing(scales):
    model, tokens = model_of("fp8", scales=scales), rows()[:, :-1]
    loss = model.summed_loss(tokens, torch.full_like(tokens, -1))
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_evaluation_in_fp8_is_bf16_to_the_bit():
    narrow, wide = model_of("fp8"), model_of("bf16")
    gradients(narrow)  # quantises
    tokens = rows()
    for evaluating in (True, False):
        narrow.train(not evaluating)
        with torch.no_grad():
            assert torch.equal(narrow(tokens), wide(tokens))
            args = tokens[:, :-1], tokens[:, 1:]
            assert torch.equal(narrow.token_losses(*args), wide.token_losses(*args))
            assert torch.equal(narrow.summed_loss(*args), wide.summed_loss(*args))


def test_a_weight_is_quantised_once_per_step(monkeypatch):
    model = model_of("fp8")
    optimizer = Optimizer(model, run_for_depth(2).optimizer, precision="fp8", world=ALONE)
    shapes = []

    def counted(x, dtype, bound=None):
        shapes.append(x.shape)
        return quantise(x, dtype, bound)

    monkeypatch.setattr(fp8, "quantise", counted)
    matrix = model.transformer.h[0].mlp.c_fc
    for _ in range(2):  # steps of two micro-steps
        shapes.clear()
        gradients(model)
        gradients(model)
        assert shapes.count(matrix.weight.shape) == 2  # layer 0 and layer 1, once each
        expected, unit = quantise(matrix.weight.detach(), E4M3)
        assert torch.equal(matrix.quantised.values.float(), expected.float())
        assert torch.equal(matrix.quantised.transposed.float(), expected.float().T)
        assert torch.equal(matrix.quantised.unit, unit)
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.0)


def test_a_vocabulary_with_padding_keeps_lm_head_in_bf16_and_trains():
    model = model_of("fp8", dataclasses.replace(CONFIG, vocab_size=250))
    tokens = rows().clamp(max=249)
    model.summed_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert not model.lm_head.weight.grad[250:].any()
    assert model.lm_head.weight.grad[:250].any()


@pytest.mark.gpu
def test_a_gpu_is_as_near_to_fp32_as_a_cpu():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no GPU with fp8 here")
    on_gpu = model_of("fp8").cuda()
    tokens = rows()
    exact, on_cpu = gradients(model_of("fp32")), gradients(model_of("fp8"))
    (on_gpu.summed_loss(tokens[:, :-1].cuda(), tokens[:, 1:].cuda()) / 64).backward()
    # Not scalars: the terms of their gradients nearly cancel, and in fp8 most of the sum is noise.
    for name, parameter in on_gpu.named_parameters():
        if parameter.dim() == 2 and exact[name].norm() > 0:
            error = (parameter.grad.cpu().double() - exact[name]).norm()
            # Below half of it the GPU would not have computed in fp8.
            assert 0.5 < error / (on_cpu[name] - exact[name]).norm() < 1.5, name


def test_products_of_any_number_of_tokens_have_shapes_that_a_gpu_takes():
    # A CPU's `_scaled_mm` takes any shape; meta tensors follow the rules of CUDA's.
    weight = torch.nn.Parameter(torch.empty(256, 128, dtype=torch.bfloat16, device="meta"))
    quantised = Quantised(weight)
    grad = torch.empty(111, 256, dtype=E5M2, device="meta")
    hidden = torch.empty(111, 128, dtype=E4M3, device="meta")
    with pytest.raises(RuntimeError, match="divisible by 16"):
        fp8.weight_gradient(grad, quantised.unit, hidden, quantised.unit)
    for num_tokens in (111, 112):
        hidden = torch.empty(num_tokens, 128, dtype=torch.bfloat16, device="meta")
        hidden.requires_grad_()
        targets = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        scale = torch.empty(num_tokens, device="meta")
        loss = softcap_loss(hidden, weight, targets, scale, softcap=15.0, quantised=quantised)
        loss.backward()
        assert hidden.grad is not None
        hidden = hidden.detach().requires_grad_()
        fp8.linears(hidden, [weight], [quantised])[0].sum().backward()
    down = torch.nn.Parameter(torch.empty(128, 256, dtype=torch.bfloat16, device="meta"))
    fp8.mlp(hidden, weight, down, (quantised, Quantised(down))).sum().backward()


def test_the_gradient_of_an_odd_number_of_tokens_is_near_that_of_bf16():
    weight = torch.nn.Parameter(random(256, 128).bfloat16())
    found = []
    for narrow in (*quantised(weight), None):
        hidden, targets = random(37, 128, seed=2).bfloat16(), torch.arange(37)
        loss = softcap_loss(hidden, weight, targets, torch.ones(37), softcap=15.0, quantised=narrow)
        found.extend(torch.autograd.grad(loss, weight))
    difference = (found[0].double() - found[1].double()).norm() / found[1].double().norm()
    assert 0 < difference < 0.1
