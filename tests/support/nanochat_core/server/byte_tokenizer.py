"""The tokenizer of the engine without a model: a token a byte."""

from nanochat_core.tokenizer.bpe import Tokenizer

TOKENIZER = Tokenizer({bytes([i]): i for i in range(256)})
