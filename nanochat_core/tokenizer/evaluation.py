"""Evaluate a vocabulary: bytes per token on several kinds of text, compared with GPT-2 and GPT-4.

The texts are ours, in kinds_of_text.txt: the same short story in ten languages, science, programs
and maths. The token counts of GPT-2 and GPT-4 (cl100k_base) on them are stored here, so no download
is needed.
"""

from collections.abc import Sequence

from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.kinds_of_text import read_kinds

HELD_OUT = "held-out"
# sha256 of the texts that were counted. After changing a text, count again:
# `TIKTOKEN_CACHE_DIR=... pytest tests/unit/nanochat_core/tokenizer/test_evaluation.py` prints them.
COUNTED_TEXTS = "40aa0564a23d7f29f1c825a8a146c13019f0499c7f7192b4253121772ebfda62"
# kind -> tokens of each of NAMES
COUNTED = {
    "english": (251, 245),
    "science": (327, 331),
    "python": (699, 426),
    "c": (511, 376),
    "maths": (770, 645),
    "german": (473, 357),
    "french": (439, 353),
    "spanish": (437, 333),
    "russian": (1056, 465),
    "arabic": (866, 607),
    "hindi": (1435, 969),
    "chinese": (707, 423),
    "japanese": (637, 495),
    "korean": (1134, 580),
}
NAMES = ("gpt2", "cl100k_base")


def evaluate(tokenizer: Tokenizer, held_out: Sequence[str]) -> dict[str, float]:
    """Return bytes per token: of `tokenizer` under each kind's name, of others under "kind/name".

    The text `held_out` is a kind of its own, on which others are not evaluated.
    """
    found = {HELD_OUT: _bytes_of(held_out) / sum(map(len, tokenizer.encode_batch(held_out)))}
    for kind, text in read_kinds().items():
        found[kind] = _bytes_of([text]) / len(tokenizer.encode(text))
        for name, tokens in zip(NAMES, COUNTED[kind], strict=True):
            found[f"{kind}/{name}"] = _bytes_of([text]) / tokens
    return found


def _bytes_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)
