"""Evaluate a vocabulary: bytes per token on several kinds of text, compared with GPT-2 and GPT-4.

The texts are ours, in kinds_of_text.txt: the same short story in ten languages, science, programs
and maths. The token counts of GPT-2 and GPT-4 (cl100k_base) on them are stored here, so no download
is needed. Held-out text of the shards needs their files, which are used if tiktoken's cache has
them, and never downloaded.
"""

from collections.abc import Mapping, Sequence

import tiktoken

from nanochat_core.runtime.tiktoken_cache import find_cached
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.kinds_of_text import read_kinds

HELD_OUT = "held-out"
# sha256 of the texts that were counted. After changing a text, count again:
# `TIKTOKEN_CACHE_DIR=... pytest tests/unit/nanochat_core/tokenizer/test_evaluation.py` prints them.
COUNTED_TEXTS = "40aa0564a23d7f29f1c825a8a146c13019f0499c7f7192b4253121772ebfda62"
# kind -> tokens of GPT-2 and of cl100k_base
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
_HOST = "https://openaipublic.blob.core.windows.net"
# name -> tiktoken's encodings of that vocabulary, each with the files it reads and their sha256
PUBLISHED: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "gpt2": {
        "r50k_base": {  # the vocabulary of GPT-2 under another name, in one file
            f"{_HOST}/encodings/r50k_base.tiktoken": (
                "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
            ),
        },
        "gpt2": {
            f"{_HOST}/gpt-2/encodings/main/vocab.bpe": (
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
            ),
            f"{_HOST}/gpt-2/encodings/main/encoder.json": (
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
            ),
        },
    },
    "cl100k_base": {
        "cl100k_base": {
            f"{_HOST}/encodings/cl100k_base.tiktoken": (
                "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
            ),
        },
    },
}


def evaluate(tokenizer: Tokenizer, held_out: Sequence[str]) -> dict[str, float]:
    """Return bytes per token: of `tokenizer` under each kind's name, of others under "kind/name".

    On the text `held_out`, others are evaluated only if this machine has their files.
    """
    found = {HELD_OUT: _bytes_of(held_out) / sum(map(len, tokenizer.encode_batch(held_out)))}
    for name, encoding in find_published().items():
        tokens = sum(len(encoding.encode_ordinary(text)) for text in held_out)
        found[f"{HELD_OUT}/{name}"] = _bytes_of(held_out) / tokens
    for kind, text in read_kinds().items():
        found[kind] = _bytes_of([text]) / len(tokenizer.encode(text))
        for name, tokens in zip(PUBLISHED, COUNTED[kind], strict=True):
            found[f"{kind}/{name}"] = _bytes_of([text]) / tokens
    return found


def find_published() -> dict[str, tiktoken.Encoding]:
    """Return the published vocabularies whose files this machine has, by name."""
    found: dict[str, tiktoken.Encoding] = {}
    for name, encodings in PUBLISHED.items():
        for encoding, files in encodings.items():
            # Checked first: get_encoding downloads a file that is missing.
            if all(find_cached(url, sha256=sha256) for url, sha256 in files.items()):
                found[name] = tiktoken.get_encoding(encoding)
                break
    return found


def _bytes_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)
