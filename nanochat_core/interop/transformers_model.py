"""A nanochat-flows model for Hugging Face transformers (`trust_remote_code=True`).

This file is copied next to the weights of an exported model. It needs torch and transformers only.
The architecture: RMSNorm without weights, rotary positions and QK-norm, relu^2, smear (a token
mixes in its predecessor's embedding), value embeddings on every second layer, weights per layer on
the residual stream and on the first embedding, backout (a share of the middle layer's stream is
subtracted at the end), sliding windows, soft-capped logits. All constants are in config.json.

Shapes: B rows, T new tokens, S tokens with those in the cache, C width, H heads, K key/value heads,
D channels of a head, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

Rotary = tuple[Tensor, Tensor]


class NanochatFlowsConfig(PretrainedConfig):
    """Shape and constants of a model: every value is written out in config.json."""

    model_type = "nanochat_flows"

    def __init__(self, use_cache: bool = True, **values) -> None:
        self.use_cache = use_cache  # the base class takes it for a setting of generation
        values.setdefault("tie_word_embeddings", False)
        super().__init__(**values)


class NanochatAttention(nn.Module):
    """Attention inside a sliding window; keys and values are stored in the cache, if any."""

    def __init__(self, config: NanochatFlowsConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.head_dim = config.hidden_size // config.num_attention_heads
        kv_width = config.num_key_value_heads * self.head_dim
        self.c_q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.c_k = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.c_v = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if layer in config.value_embed_layers:
            self.ve_gate = nn.Linear(config.gate_channels, config.num_key_value_heads, bias=False)

    def forward(
        self,
        h: Tensor,
        value_embed: Tensor | None,
        rotary: Rotary,
        mask: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        """Attend: h (B, T, C), mask (B, 1, T, S) bool -> (B, T, C)."""
        q, k, v = (m(h).unflatten(-1, (-1, self.head_dim)) for m in (self.c_q, self.c_k, self.c_v))
        if value_embed is not None:
            # One gate per key/value head, from the first channels of the normalised input.
            gate = torch.sigmoid(self.ve_gate(h[..., : self.config.gate_channels]))
            v = v + (self.config.gate_scale * gate).unsqueeze(-1) * value_embed.view_as(v)
        # QK-norm comes after the rotation, as in training.
        q, k = self._norm(rotate(q, rotary)), self._norm(rotate(k, rotary))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))

    def _norm(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, (self.head_dim,), eps=self.config.rms_norm_eps)
        return x if self.config.qk_scale == 1.0 else x * self.config.qk_scale


class NanochatMLP(nn.Module):
    """Two matrices with relu^2 between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Map (B, T, C) -> (B, T, C)."""
        return self.c_proj(F.relu(self.c_fc(h)).square())


class NanochatBlock(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: NanochatFlowsConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attn = NanochatAttention(config, layer)
        self.mlp = NanochatMLP(config.hidden_size)

    def forward(
        self,
        x: Tensor,
        value_embed: Tensor | None,
        rotary: Rotary,
        mask: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        """Map (B, T, C) -> (B, T, C)."""
        x = x + self.attn(rms_norm(x, self.eps), value_embed, rotary, mask, cache)
        return x + self.mlp(rms_norm(x, self.eps))


class NanochatTransformer(nn.Module):
    """The embedding table and the blocks."""

    def __init__(self, config: NanochatFlowsConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(NanochatBlock(config, i) for i in range(config.num_hidden_layers))


class NanochatFlowsForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model with its head."""

    config_class = NanochatFlowsConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["NanochatBlock"]  # noqa: RUF012 - as transformers has it
    _supports_sdpa = True

    def __init__(self, config: NanochatFlowsConfig) -> None:
        super().__init__(config)
        width, depth = config.hidden_size, config.num_hidden_layers
        kv_width = config.num_key_value_heads * (width // config.num_attention_heads)
        self.transformer = NanochatTransformer(config)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, kv_width) for i in config.value_embed_layers}
        )
        if config.residual_scalars:
            self.resid_lambdas = nn.Parameter(torch.ones(depth))
            self.x0_lambdas = nn.Parameter(torch.zeros(depth))
        if config.smear:
            self.smear_gate = nn.Linear(config.smear_channels, 1, bias=False)
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding table."""
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table."""
        assert isinstance(value, nn.Embedding)
        self.transformer.wte = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        **others,
    ) -> CausalLMOutputWithPast | tuple:
        """Compute logits (B, T, V) fp32 of all tokens, the last `logits_to_keep` or those listed.

        input_ids (B, T); attention_mask (B, S), 0 on padding to the left; position_ids (B, T). With
        labels (B, T; -100: ignored) also the mean cross-entropy of predicting each label from the
        tokens before it, or the sum over num_items_in_batch. Raises ValueError for arguments that
        it does not support.
        """
        config = self.config
        _refuse(others, past_key_values)
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        num_read = past_key_values.get_seq_length() if past_key_values is not None else 0
        total = num_read + input_ids.size(1)
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), total)
        real = attention_mask[:, :total].bool()  # (B, S)
        # Positions count real tokens only, so that padding to the left does not shift them.
        if position_ids is None:
            position_ids = (real.long().cumsum(-1) - 1).clamp(min=0)[:, num_read:]
        x = self._stream(input_ids, real, position_ids, past_key_values)
        listed = isinstance(logits_to_keep, Tensor)
        x = x[:, logits_to_keep if listed else slice(-logits_to_keep, None)]
        logits = self.lm_head(rms_norm(x, config.rms_norm_eps)).float()
        logits = config.softcap * torch.tanh(logits / config.softcap)
        loss = None
        if labels is not None:
            # Shifted here: transformers passes labels aligned with the inputs.
            said, meant = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            if num_items_in_batch is None:
                loss = F.cross_entropy(said, meant)
            else:
                loss = F.cross_entropy(said, meant, reduction="sum") / num_items_in_batch
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output.to_tuple() if return_dict is False else output

    def _stream(
        self, tokens: Tensor, real: Tensor, position_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        """Return the output of the last block, before the final norm: (B, T, C)."""
        config, num_new, total = self.config, tokens.size(1), real.size(1)
        x = rms_norm(self.transformer.wte(tokens), config.rms_norm_eps)
        if config.smear:
            x = x + self._smear(x, real, cache)
        first = middle = x  # the first embedding, mixed into every layer, is the smeared one
        rotary = self._rotary(position_ids, x.dtype)
        slots = torch.arange(total, device=x.device)
        distance = slots[total - num_new :, None] - slots  # (T, S)
        for i, block in enumerate(self.transformer.h):
            if config.residual_scalars:
                x = self.resid_lambdas[i].to(x.dtype) * x + self.x0_lambdas[i].to(x.dtype) * first
            seen = (distance >= 0) & (distance <= config.windows[i]) & real[:, None, :]
            # A padding token sees itself: a softmax over no keys is NaN.
            seen = (seen | (distance == 0)).unsqueeze(1)
            value_embed = None
            if i in config.value_embed_layers:
                value_embed = self.value_embeds[str(i)](tokens)
            x = block(x, value_embed, rotary, seen, cache)
            if i == config.num_hidden_layers // 2:
                middle = x
        return x - self.backout_lambda.to(x.dtype) * middle if config.backout else x

    def _smear(self, x: Tensor, real: Tensor, cache: Cache | None) -> Tensor:
        """Return what each token adds of the embedding before it: (B, T, C).

        Embeddings are cached as one more layer, so that beam search reorders them with the rest.
        """
        config, num_new = self.config, x.size(1)
        embeds = x.unsqueeze(1)
        if cache is not None:
            if len(cache.layers) == config.num_hidden_layers:  # as `generate` makes them
                cache.layers.append(DynamicLayer())
            # The cache stores pairs of keys and values: the second is a single unused channel.
            embeds, _ = cache.update(embeds, embeds[..., :1], config.num_hidden_layers)
        # Shifted by one; the first token of a text has a zero before it, and so has padding.
        before = F.pad(embeds[:, 0], (0, 0, 1, 0))[:, -num_new - 1 : -1]  # (B, T, C)
        has_one = F.pad(real, (1, 0))[:, -num_new - 1 : -1].unsqueeze(-1)
        gate = torch.sigmoid(self.smear_gate(x[..., : config.smear_channels]))
        return self.smear_lambda.to(x.dtype) * gate * has_one * before

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cos and sin (B, T, 1, D / 2) at positions (B, T)."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / self.config.rope_theta ** (channels / head_dim)
        angles = (positions[..., None].float() * frequencies).unsqueeze(2)
        rounded = torch.bfloat16 if self.config.rope_in_bf16 else dtype
        return angles.cos().to(rounded).to(dtype), angles.sin().to(rounded).to(dtype)


def _refuse(others: dict, cache: Cache | None) -> None:
    """Raise ValueError for arguments that the model would otherwise silently ignore."""
    for name in ("inputs_embeds", "output_hidden_states", "output_attentions"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"this model does not take {name}")
    if cache is not None and not isinstance(cache, DynamicCache):
        raise ValueError(f"this model keeps a DynamicCache, not {type(cache).__name__}")


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to x (B, T, heads, D): channel j is paired with channel j + D/2."""
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
