"""What a model's configuration implies about the shapes of its parameters.

Plain numbers without torch: the plan counts with them too. They are decisions, so they stand here
and not with the configuration, whose module is part of no fingerprint
(flows/identity/fingerprint.py).
"""

from nanochat_core.config import ModelConfig


def head_dim(model: ModelConfig) -> int:
    """Channels per head."""
    return model.width // model.num_heads


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding tables and of lm_head: vocab_size rounded up to a multiple of 64."""
    return -(-model.vocab_size // 64) * 64


def value_embed_layers(model: ModelConfig) -> tuple[int, ...]:
    """Layers with a value embedding: every second one, the last always; or none has one."""
    last = model.depth - 1
    return tuple(i for i in range(model.depth) if model.value_embeds and (last - i) % 2 == 0)
