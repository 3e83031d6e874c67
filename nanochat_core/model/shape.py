"""The parameter shapes that follow from a model's configuration.

Plain numbers without torch, as planning uses them too. They decide results, so they are not in
config.py, whose code is part of no fingerprint (flows/identity/fingerprint.py).
"""

from nanochat_core.config import ModelConfig


def head_dim(model: ModelConfig) -> int:
    """Return the channels per head."""
    return model.width // model.num_heads


def padded_vocab_size(model: ModelConfig) -> int:
    """Return the rows of the embedding tables and lm_head: vocab_size rounded up to 64s."""
    # -(-a // b) is a / b rounded up.
    return -(-model.vocab_size // 64) * 64


def value_embed_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the layers with a value embedding: every second one, always with the last; or ()."""
    last = model.depth - 1
    return tuple(i for i in range(model.depth) if model.value_embeds and (last - i) % 2 == 0)
