"""nanochat's recipe once more, straight from its formulas: float64, nothing fast, nothing shared.

What is trained by it is the judge of what `nanochat_core` trains, so nothing is imported from
there. Every constant of the recipe is a field of `Recipe`: other eras have others. A `shape` has
the fields depth, width, num_heads, num_kv_heads, vocab_size and windows, as our config has.

Shapes: B rows, T tokens, C width, H query heads, K key/value heads, D head dim, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, list[Tensor]]  # of each parameter its optimizer's two moments

POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every constant; those without a default depend on the size of the run."""

    num_steps: int
    total_batch_size: int  # tokens, as far as the learning rates are concerned
    tokens: int  # of the whole run, likewise
    reference_tokens: int  # ... of the reference depth
    warmup_steps: int = 40
    momentum_warmup_steps: int = 400
    warmdown: float = 0.65
    final_lr: float = 0.05
    momentum: tuple[float, float, float] = (0.85, 0.97, 0.90)
    rotary_base: float = 100_000.0
    rounded_rotary: bool = False  # its table is stored in bf16, as before March 2026
    qk_scale: float = 1.2
    softcap: float = 15.0
    gate_scale: float = 3.0
    gate_channels: int = 12
    smear_channels: int = 24
    norm_eps: float = 2.0**-23
    backout_after: float = 0.5  # of the depth
    muon_lr: float = 0.02
    muon_decay: float = 0.28
    muon_beta2: float = 0.9
    adam_eps: float = 1e-10
    # lr, scaled with width?, beta1, beta2, weight decay
    lm_head: tuple[float, bool, float, float, float] = (0.008, True, 0.8, 0.96, 0.01)
    wte: tuple[float, bool, float, float, float] = (0.3, True, 0.8, 0.995, 0.001)
    value_embeds: tuple[float, bool, float, float, float] = (0.15, True, 0.8, 0.995, 0.01)
    resid_lambdas: tuple[float, bool, float, float, float] = (0.005, False, 0.8, 0.95, 0.05)
    x0_lambdas: tuple[float, bool, float, float, float] = (0.5, False, 0.96, 0.95, 0.0)
    smear: tuple[float, bool, float, float, float] = (0.2, False, 0.8, 0.95, 0.0)


def token_losses_at(
    weights: dict[str, Tensor], batches: Sequence[Tensor], shape: Any, recipe: Recipe
) -> Iterator[float]:
    """Train on each batch, (B, T+1) int64, once; the mean loss in nats before each update."""
    state: State = {}
    weights = {name: w.detach().double() for name, w in weights.items()}
    for step, batch in enumerate(batches):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        loss = mean_loss(leaves, batch, shape, recipe)
        loss.backward()
        yield loss.item()
        for name, leaf in leaves.items():
            assert leaf.grad is not None, name
            update = muon if name.startswith("transformer.h.") else adamw
            weights[name] = update(name, weights[name], leaf.grad, state, step, shape.width, recipe)


def rms(x: Tensor, recipe: Recipe) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + recipe.norm_eps).sqrt()


def mean_loss(w: dict[str, Tensor], batch: Tensor, shape: Any, recipe: Recipe) -> Tensor:
    """Mean cross-entropy of a batch (B, T+1)."""
    logits = forward(w, batch[:, :-1], shape, recipe)
    targets = batch[:, 1:]
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(dim=-1).log() - chosen).mean()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, T, V) of a model of ours by its weights and settings alone."""
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    config, constants = model.config, model.numerics
    names = ("rotary_base", "qk_scale", "softcap", "gate_scale", "norm_eps")
    recipe = Recipe(
        num_steps=1, total_batch_size=1, tokens=1, reference_tokens=1,
        gate_channels=constants.gate_channels, smear_channels=constants.smear_channels,
        rounded_rotary=constants.rotary_precision == "bf16",
        **{name: getattr(constants, name) for name in names},
    )  # fmt: skip
    return forward(weights, tokens, config, recipe)


def forward(w: dict[str, Tensor], tokens: Tensor, shape: Any, recipe: Recipe) -> Tensor:
    """Logits (B, T, V). Parts of which there are no weights are left out, as in earlier eras."""
    x = rms(w["transformer.wte.weight"][tokens], recipe)
    if "smear_lambda" in w:
        # None comes before the first.
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        gate = torch.sigmoid(x[..., : recipe.smear_channels] @ w["smear_gate.weight"].T)
        x = x + w["smear_lambda"] * gate * before
    first = middle = x
    for i in range(shape.depth):
        if "resid_lambdas" in w:
            x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * first
        x = x + attention(w, rms(x, recipe), tokens, i, shape, recipe)
        inner = rms(x, recipe) @ w[f"transformer.h.{i}.mlp.c_fc.weight"].T
        x = x + inner.clamp(min=0).pow(2) @ w[f"transformer.h.{i}.mlp.c_proj.weight"].T
        if i == math.floor(shape.depth * recipe.backout_after):
            middle = x
    x = rms(x - w.get("backout_lambda", 0.0) * middle, recipe)
    z = (x @ w["lm_head.weight"].T)[..., : shape.vocab_size]
    return recipe.softcap * torch.tanh(z / recipe.softcap)


def attention(
    w: dict[str, Tensor], h: Tensor, tokens: Tensor, i: int, shape: Any, recipe: Recipe
) -> Tensor:
    """What layer i's attention adds, (B, T, C); one head after another."""
    prefix, dim = f"transformer.h.{i}.attn.", shape.width // shape.num_heads
    q, k, v = (h @ w[f"{prefix}c_{name}.weight"].T for name in "qkv")
    if i % 2 == (shape.depth - 1) % 2 and f"value_embeds.{i}.weight" in w:
        table = w[f"value_embeds.{i}.weight"][tokens]
        gate = torch.sigmoid(h[..., : recipe.gate_channels] @ w[f"{prefix}ve_gate.weight"].T)
        v = v + (recipe.gate_scale * gate).repeat_interleave(dim, dim=-1) * table
    place = torch.arange(h.size(1))
    distance = place.unsqueeze(1) - place.unsqueeze(0)  # query - key
    hidden = (distance < 0) | (distance > shape.windows[i])
    heads: list[Tensor] = []
    for head in range(shape.num_heads):
        shared = head // (shape.num_heads // shape.num_kv_heads)
        queries = turn(q[..., head * dim : (head + 1) * dim], recipe)
        keys = turn(k[..., shared * dim : (shared + 1) * dim], recipe)
        scores = queries @ keys.mT / math.sqrt(dim)
        chances = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        heads.append(chances @ v[..., shared * dim : (shared + 1) * dim])
    return torch.cat(heads, dim=-1) @ w[f"{prefix}c_proj.weight"].T


def turn(x: Tensor, recipe: Recipe) -> Tensor:
    """Rotary positions, norm and scale on one head (B, T, D)."""
    half = x.size(-1) // 2
    angles = torch.outer(
        torch.arange(x.size(1)).double(),
        recipe.rotary_base ** (-torch.arange(half).double() / half),
    )
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    if recipe.rounded_rotary:
        cos, sin = (t.bfloat16().double() for t in (angles.float().cos(), angles.float().sin()))
    turned = [a * cos + b * sin, b * cos - a * sin]
    return recipe.qk_scale * rms(torch.cat(turned, dim=-1), recipe)


def lr_multiplier(step: int, recipe: Recipe) -> float:
    """Rise, hold, fall."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    fall = round(recipe.warmdown * recipe.num_steps)
    if step <= recipe.num_steps - fall:
        return 1.0
    left = (recipe.num_steps - step) / fall
    return left + (1 - left) * recipe.final_lr


def momentum(step: int, recipe: Recipe) -> float:
    """Muon's; the rise comes before the fall where both would hold."""
    start, peak, end = recipe.momentum
    if step < recipe.momentum_warmup_steps:
        return start + (peak - start) * step / recipe.momentum_warmup_steps
    fall = round(recipe.warmdown * recipe.num_steps)
    begin = recipe.num_steps - fall
    return peak if step < begin else peak + (end - peak) * (step - begin) / fall


def muon(
    name: str, weight: Tensor, grad: Tensor, state: State, step: int, width: int, recipe: Recipe
) -> Tensor:
    rows, cols = weight.shape
    zeros = weight.new_zeros((rows, 1) if rows >= cols else (1, cols))
    kept = state.setdefault(name, [torch.zeros_like(weight), zeros])
    batch = math.sqrt(recipe.total_batch_size / 2**19)
    lr = recipe.muon_lr * batch * lr_multiplier(step, recipe)
    decay = recipe.muon_decay * batch * recipe.reference_tokens / recipe.tokens
    decay *= (1 + math.cos(math.pi * step / recipe.num_steps)) / 2
    return muon_step(weight, grad, kept, lr, momentum(step, recipe), decay, recipe.muon_beta2)


def muon_step(
    weight: Tensor, grad: Tensor, kept: list[Tensor], lr: float, mu: float, decay: float, beta2=0.9
) -> Tensor:
    """The weight after an update, which changes `kept`: the momentum and the second moment."""
    rows, cols = weight.shape
    axis = 1 if rows >= cols else 0
    m = mu * kept[0] + (1 - mu) * grad
    u = mu * m + (1 - mu) * grad
    norms = u.pow(2).sum(dim=1, keepdim=True).sqrt().clamp(min=1e-6)
    u = u / norms * (frobenius(u) / math.sqrt(rows))
    y = u / (1.01 * frobenius(u) + 1e-6)
    for a, b, c in POLAR:
        if rows > cols:
            gram = y.T @ y
            y = a * y + y @ (b * gram + c * gram @ gram)
        else:
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
    y = y * math.sqrt(min(rows, cols)) / frobenius(y).clamp(min=1e-6)
    mean = y.pow(2).mean(dim=axis, keepdim=True)
    s = beta2 * kept[1] + (1 - beta2) * mean
    kept[:] = [m, s]
    r = s.clamp(min=1e-10).rsqrt()
    n = weight.size(axis)
    before, after = (n * mean.sum()).sqrt(), (n * (mean * r * r).sum()).sqrt()
    y = y * r * before / after.clamp(min=1e-10)
    lr *= math.sqrt(max(1.0, rows / cols))
    return weight - lr * y - lr * decay * weight * (y * weight >= 0)


def frobenius(x: Tensor) -> Tensor:
    """The norm of a matrix as one long vector."""
    return x.pow(2).sum().sqrt()


def adamw(
    name: str, weight: Tensor, grad: Tensor, state: State, step: int, width: int, recipe: Recipe
) -> Tensor:
    for group in ("lm_head", "value_embeds", "resid_lambdas", "x0_lambdas", "wte"):
        if group in name:
            break
    else:
        group = "smear"  # its gate and lambda, and backout's
    base, by_width, beta1, beta2, decay = getattr(recipe, group)
    lr = base * lr_multiplier(step, recipe)
    if group != "smear":
        lr *= math.sqrt(recipe.total_batch_size / 2**19)
    if by_width:
        lr *= math.sqrt(768 / width)
    m, v = state.get(name, [torch.zeros_like(weight), torch.zeros_like(weight)])
    weight = weight * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad.pow(2)
    state[name] = [m, v]
    denominator = (v / (1 - beta2 ** (step + 1))).sqrt() + recipe.adam_eps
    return weight - lr / (1 - beta1 ** (step + 1)) * m / denominator
