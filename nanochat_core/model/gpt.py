"""The transformer: nanochat's architecture, with every era's constants from `NumericsConfig`.

Differences from a plain GPT: parameter-free RMSNorm, rotary positions and QK-norm, relu^2, smear
(a token mixes in its predecessor's embedding), value embeddings on every second layer, per-layer
weights on the residual stream and on the first embedding, backout (a learned share of the middle
layer's stream is subtracted at the end), sliding windows, soft-capped logits. Smear, value
embeddings, the per-layer weights and backout are optional: `ModelConfig` enables them, and disabled
parts have no parameters (see eras.py). `GPT.trunk` is the model; what follows it are its losses.

Shapes: B rows, T tokens, C width, H query heads, K key/value heads, D head dim, V vocabulary.
Weights are fp32, embeddings in the compute dtype, which every matrix is cast to where it is used.
Activations are in the compute dtype too, but in bf16 training on a CPU: there they are fp32, but
for products of linear maps and the head. Passes without gradients are bf16 throughout.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_core.config import ModelConfig, NumericsConfig, check_channels
from nanochat_core.model import fp8
from nanochat_core.model.attention import attend, rotate_normalise
from nanochat_core.model.layers import (
    Embedding,
    LateModule,
    Linear,
    Rotary,
    activation_dtype,
    initialise,
    mix_residual,
    project,
    refresh_fp8,
    relu_square,
    rms_norm,
    rotary_table,
)
from nanochat_core.model.loss import softcap_loss, softcap_losses
from nanochat_core.model.shape import head_dim, padded_vocab_size, value_embed_layers
from nanochat_core.runtime.hardware.compile import autotuning, compiled_by_shape
from nanochat_core.runtime.hardware.device import choose_vml_kernels, compute_dtype

IGNORED = -1  # a target without a loss
ROTARY_ROWS = 10  # the rotary table covers this many times sequence_len before it has to grow

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> like q
Attends: TypeAlias = Sequence[Attend]  # of each layer


class Attention(nn.Module):
    """Multi-head attention with rotary positions, QK-norm and an optional value embedding."""

    def __init__(self, config: ModelConfig, numerics: NumericsConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim(config)
        self.numerics = numerics
        kv_width = config.num_kv_heads * head_dim(config)
        self.c_q = Linear(config.width, config.width)
        self.c_k = Linear(config.width, kv_width)
        self.c_v = Linear(config.width, kv_width)
        self.c_proj = Linear(config.width, config.width)
        if layer in value_embed_layers(config):
            self.ve_gate = Linear(numerics.gate_channels, config.num_kv_heads)

    def forward(
        self,
        h: Tensor,
        value_embed: Tensor | None,
        rotary: Rotary,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Attend from h (B, T, C), normalised; value_embed (B, T, K*D) on layers that have one.

        With `rows` (R,), which index T, only these tokens have queries: (B, R, C).
        """
        bound = math.sqrt(h.size(-1)) if self.numerics.fp8_scales == "bound" else None
        query_rotary = rotary
        if rows is None:
            q, k, v = project(h, (self.c_q, self.c_k, self.c_v), bound)
        else:
            q, k, v = self.c_q(h[:, rows]), self.c_k(h), self.c_v(h)
            query_rotary = (rotary[0][:, rows], rotary[1][:, rows])
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, T, H or K, D)
        if value_embed is not None:
            # v += gate_scale * sigmoid(W h[:channels]) * embedding: one gate per key/value head,
            # read from the first few channels of the normalised block input.
            gate = torch.sigmoid(self.ve_gate(h[..., : self.numerics.gate_channels]))
            gate = (self.numerics.gate_scale * gate).unsqueeze(-1)  # (B, T, K, 1)
            v = v + gate * value_embed.view_as(v)
        # Normalised, q and k cannot grow without bound. qk_scale (1.2 today) sharpens attention:
        # both factors multiply the softmax's 1/sqrt(D).
        eps, scale = self.numerics.norm_eps, self.numerics.qk_scale
        q = rotate_normalise(q, query_rotary, eps, scale)
        k = rotate_normalise(k, rotary, eps, scale)
        return self.c_proj(attend(q, k, v).flatten(-2))


class MLP(nn.Module):
    """Two matrices with relu^2 between them, four times as wide inside."""

    def __init__(self, width: int, *, bounded: bool = False) -> None:
        """`bounded`: fp8 scales come from bounds, and the inputs are normalised."""
        super().__init__()
        self.bounded = bounded
        self.c_fc = Linear(width, 4 * width)
        self.c_proj = Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, T, C) -> (B, T, C)."""
        up, down = self.c_fc.in_training(), self.c_proj.in_training()
        if self.bounded and up and down and h[..., 0].numel() % fp8.MULTIPLE == 0:
            return fp8.mlp(h, self.c_fc.weight, self.c_proj.weight, (up, down))
        return self.c_proj(relu_square(self.c_fc(h)))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, numerics: NumericsConfig, layer: int) -> None:
        super().__init__()
        self.norm_eps = numerics.norm_eps
        self.attn = Attention(config, numerics, layer)
        self.mlp = MLP(config.width, bounded=numerics.fp8_scales == "bound")

    def forward(
        self,
        x: Tensor,
        first: tuple[Tensor, Tensor, Tensor] | None,
        value_embed: Tensor | None,
        rotary: Rotary,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) -> (B, T, C); with `rows` (R,) of T compute only those: (B, R, C).

        `first`: the first block's input, and the scales of x and of it in what is read.
        """
        x = x if first is None else mix_residual(x, *first)
        mixed = self.attn(rms_norm(x, self.norm_eps), value_embed, rotary, attend, rows)
        x = (x if rows is None else x[:, rows]) + mixed
        return x + self.mlp(rms_norm(x, self.norm_eps))


class Transformer(nn.Module):
    """The embedding table and the blocks; named as nanochat's checkpoints name them."""

    def __init__(self, config: ModelConfig, numerics: NumericsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.wte = Embedding(padded_vocab_size(config), config.width, dtype)
        self.h = nn.ModuleList(Block(config, numerics, layer) for layer in range(config.depth))


class GPT(LateModule):
    """The language model. Weights are uninitialised: call `init_weights` or load a state dict.

    Parameter names and shapes are those of nanochat's checkpoints.
    """

    def __init__(self, config: ModelConfig, numerics: NumericsConfig) -> None:
        super().__init__()
        # Perhaps under torch.device("meta"): tensors have shapes here, and no values yet.
        check_channels(config, numerics)
        choose_vml_kernels()
        self.config = config
        self.numerics = numerics
        self.dtype = compute_dtype(numerics.precision)
        vocab, kv_width = padded_vocab_size(config), config.num_kv_heads * head_dim(config)
        self.transformer = Transformer(config, numerics, self.dtype)
        self.lm_head = Linear(config.width, vocab)
        self.value_embeds = nn.ModuleDict(
            {str(i): Embedding(vocab, kv_width, self.dtype) for i in value_embed_layers(config)}
        )
        if config.residual_scalars:
            self.resid_lambdas = nn.Parameter(torch.empty(config.depth))
            self.x0_lambdas = nn.Parameter(torch.empty(config.depth))
        if config.smear:
            self.smear_gate = Linear(numerics.smear_channels, 1)
            self.smear_lambda = nn.Parameter(torch.empty(1))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        for module in self.modules():
            if isinstance(module, Linear):
                module.dtype = self.dtype
        self._rotary: Rotary | None = None
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self._block: Callable[..., Tensor] = Block.forward

    def compile_passes(self, *, by_block: bool = False, autotune: bool = False) -> None:
        """Compile training and evaluation passes with torch.compile, once per batch shape.

        The first pass of a shape takes up to minutes; `by_block` less, with a graph for each kind
        of block; with `autotune`, where the compiler times every product, more. Not for decoding.
        """
        # A table made while a pass is traced would have the second pass compiled again.
        self._rotary_table(self.config.sequence_len, self.lm_head.weight.device)
        options = autotuning(self.numerics.precision) if autotune else None

        def compiled(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return compiled_by_shape(part, options)

        if not by_block:
            self._compiled = compiled(self._read_rows)
            return
        self._compiled, block = self._read_rows, compiled(Block.forward)
        self._embed, self._back_out = compiled(self._embed), compiled(self._back_out)
        # x as a view: block 0, given one tensor twice, would be a kind of its own.
        self._block = lambda module, x, *rest: block(module, x.view_as(x), *rest)

    @property
    def is_compiled(self) -> bool:
        """True after `compile_passes`."""
        return self._compiled is not None

    def init_weights(self, seed: int) -> None:
        """Initialise every parameter, equally on every device and machine: see `initial_value`."""
        # The zeroed c_proj make every block the identity at first; a smear_lambda of 0 disables
        # smear.
        initialise(self, seed, self.config, self.numerics)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, T, V) fp32 of tokens (B, T) int64."""
        z = self.lm_head(rms_norm(self._hidden(tokens), self.numerics.norm_eps))
        # tanh limits a logit to the soft cap, in fp32, smoothly: no token is ever ruled out. First
        # the padding rows are cut off: no token has their ids, and a softmax must not count them.
        z = z[..., : self.config.vocab_size].float()
        return self.numerics.softcap * torch.tanh(z / self.numerics.softcap)

    def trunk(
        self,
        tokens: Tensor,
        rotary: Rotary,
        attends: Attends,
        parents: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the last block's output (B, T, C) of tokens (B, T), before the norm and lm_head.

        `attends`: attention of each layer. `parents` and `rows`: see `forward_tree`, which has its
        own arrangement of tokens; with `rows` (R,) the last layer computes only these: (B, R, C).
        """
        # Trees have another shape each time: for them nothing is compiled.
        is_row = rows is None
        block: Callable[..., Tensor] = self._block if is_row else Block.forward
        x = self._embed(tokens) if is_row else GPT._embed(self, tokens, parents)
        embedded, first, middle, last = x, None, x, self.config.depth - 1
        ordered = self.transformer.wte.sort(tokens)  # once for all value embeddings
        for i, module in enumerate(self.transformer.h):
            # Every layer weighs the stream, and may add the embedding again: what a token is does
            # not drown in what the layers before have written.
            if self.config.residual_scalars:
                first = (embedded, self.resid_lambdas[i], self.x0_lambdas[i])
            # Value embeddings: on every second layer a table of its own adds to the values, so
            # attention can hand on which token it saw, however deep. They are many parameters that
            # take a lookup and no product.
            value_embed = None
            if str(i) in self.value_embeds:
                value_embed = self.value_embeds[str(i)](tokens, ordered).to(x.dtype)
            at = rows if i == last else None
            x = block(module, x, first, value_embed, rotary, attends[i], at)
            if i == self.config.depth // 2:
                middle = x
        if not self.config.backout:
            return x
        # In a model of one layer the middle is the last layer, which has computed only `rows`.
        if rows is not None and last != self.config.depth // 2:
            middle = middle[:, rows]
        return self._back_out(x, middle) if is_row else GPT._back_out(self, x, middle)

    def _embed(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Return the first block's input (B, T, C)."""
        # Normalised, so that the stream begins at one scale, whatever length AdamW's large steps
        # have given to a token's row of the table.
        dtype = activation_dtype(self.numerics.precision, tokens.device)
        x = rms_norm(self.transformer.wte(tokens).to(dtype), self.numerics.norm_eps)
        if not self.config.smear:
            return x
        # Smear: x_t += lambda * sigmoid(w x_t[:channels]) * x_(t-1). Pairs of tokens, which
        # otherwise take a layer of attention, are in the stream from the start. From the un-smeared
        # embeddings: decoding must cache the previous one. Position 0 has none, and document
        # boundaries inside a packed row are crossed, as in nanochat.
        if parents is None:
            smeared = x[:, 1:] + self._smear_gate(x[:, 1:]) * x[:, :-1]
            return torch.cat([x[:, :1], smeared], dim=1)
        gate = self._smear_gate(x) * (parents >= 0)[:, None]  # 0 at a root
        return x + gate * x[:, parents.clamp(min=0)]

    def _smear_gate(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.smear_gate(x[..., : self.numerics.smear_channels]))
        return self.smear_lambda.to(x.dtype) * gate  # (B, T, 1)

    def _back_out(self, x: Tensor, middle: Tensor) -> Tensor:
        # Backout: what the first half of the layers wrote for the second half to read need not be
        # in what predicts the next token, so a learned share of it is subtracted.
        return x - self.backout_lambda.to(x.dtype) * middle

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return cross-entropy in nats, (B, T) fp32, 0 where the target is -1. Both args (B, T).

        Train with `summed_loss`: the gradient of these computes the logits a second time.
        """
        hidden, classes, target_mask = self._targeted(tokens, targets)
        losses = softcap_losses(hidden, self._head(), classes, softcap=self.numerics.softcap)
        if len(losses) == target_mask.numel():
            return torch.where(target_mask, losses.view(target_mask.shape), 0.0)
        return losses.new_zeros(target_mask.shape).masked_scatter(target_mask, losses)

    def summed_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        """Return the sum of `token_losses`, each times its weight: a scalar, fp32.

        tokens, targets (B, T); weights a number, or fp32, broadcastable to (B, T).
        """
        hidden, classes, target_mask = self._targeted(tokens, targets)
        scale = target_mask * weights
        scale = scale.flatten() if len(classes) == target_mask.numel() else scale[target_mask]
        # The fp8 copy includes the padding rows, which must not enter the softmax.
        whole = len(self.lm_head.weight) == self.config.vocab_size
        inputs = hidden, self._head(), classes, scale
        return softcap_loss(
            *inputs,
            softcap=self.numerics.softcap,
            quantised=self.lm_head.in_training() if whole else None,
            bounded=self.numerics.fp8_scales == "bound",
            gradient_sum=self.lm_head.gradient_sum if whole and hidden.is_cuda else None,
        )

    def _targeted(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return lm_head's input (N, C), its targets (N,), and the mask (B, T) of targets with a
        loss. N counts those targets, or on a GPU all of them, the ignored ones as class 0."""
        hidden = rms_norm(self._hidden(tokens), self.numerics.norm_eps)
        target_mask = targets != IGNORED
        # Only on a CPU: the number of selected rows of a GPU tensor would force a device sync.
        if targets.device.type == "cpu" and not target_mask.all():
            return hidden[target_mask], targets[target_mask], target_mask
        return hidden.flatten(0, 1), targets.clamp(min=0).flatten(), target_mask

    def _head(self) -> Tensor:
        """Return lm_head's rows without the padding (V, C), in the compute dtype."""
        weight, size = self.lm_head.weight, self.config.vocab_size
        # Slicing all rows would still copy the gradient in the backward pass.
        return (weight if len(weight) == size else weight[:size]).to(self.dtype)

    @torch.no_grad()
    def forward_tree(
        self, tokens: Tensor, parents: Tensor, positions: Tensor, rows: Tensor, mix: Attends
    ) -> Tensor:
        """Return lm_head's input (R, C) at `rows` (R,) of tokens arranged in trees.

        tokens, parents, positions (N,) int64: the token before token i is token parents[i], -1 at a
        root, and positions[i] counts its ancestors. `mix` computes attention, see model/trees.py;
        the last layer computes nothing but `rows`.
        """
        cos, sin = self._rotary_table(int(positions.numel()) + 1, positions.device)
        rotary = (cos[positions[None]], sin[positions[None]])
        x = self.trunk(tokens[None], rotary, mix, parents, rows)
        return rms_norm(x[0], self.numerics.norm_eps)

    @torch.no_grad()
    def token_losses_at(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return cross-entropy in nats (R,) fp32 of `forward_tree` rows (R, C) at targets (R,)."""
        return softcap_losses(hidden, self._head(), targets, softcap=self.numerics.softcap)

    @torch.no_grad()
    def logits_at(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the uncapped logits (R, V) of `forward_tree` rows (R, C), in their dtype.

        With `ids` (n,) only of these tokens: (R, n). The cap is monotonic, so their order is right.
        """
        head = self._head() if ids is None else self.lm_head.weight[ids]
        return F.linear(hidden, head.to(hidden.dtype))

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Compute the last block's output (B, T, C), before the final norm, of tokens (B, T)."""
        if self.numerics.precision == "fp8" and self.training and torch.is_grad_enabled():
            refresh_fp8(self, fast_gradients=self.numerics.fp8_sums == "fast")
        return (self._compiled or self._read_rows)(tokens)

    def _read_rows(self, tokens: Tensor) -> Tensor:
        """Compute `trunk` of rows of text; traceable by torch.compile."""
        dtype = activation_dtype(self.numerics.precision, tokens.device)
        table = self._rotary_table(tokens.size(1), tokens.device)
        cos, sin = (t[None, : tokens.size(1)].to(dtype) for t in table)
        attends = [partial(attend, window=w) for w in self.config.windows]
        return self.trunk(tokens, (cos, sin), attends)

    def _rotary_table(self, length: int, device: torch.device) -> Rotary:
        """Return cos and sin (P, 1, D/2) for at least `length` positions; not in the state dict."""
        table = self._rotary
        if table is None or table[0].size(0) < length or table[0].device != device:
            rows = max(length, ROTARY_ROWS * self.config.sequence_len)
            # A table created in inference mode could not be used by a later training step.
            with torch.inference_mode(False):
                table = rotary_table(rows, head_dim(self.config), self.numerics, device)
            self._rotary = table
        return table
