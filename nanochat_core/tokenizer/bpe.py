"""Text to token ids and back: byte-level BPE, trained by rustbpe, applied by tiktoken.

On disk a tokenizer is two files: `tokenizer.tiktoken` (a line per ordinary token: its bytes in
base64 and its id) and `tokenizer.json` (split pattern and special tokens). The special tokens have
the last ids. Only the chat layout and the data path insert them: text that spells one out is
encoded as ordinary text.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tiktoken

from nanochat_core.errors import DataError, ModelError
from nanochat_core.job import sync_directory, write_json
from nanochat_core.tokenizer.patterns import KNOWN_PATTERNS, SPLIT_PATTERN

FORMAT = 1
RANKS_FILE = "tokenizer.tiktoken"
SETTINGS_FILE = "tokenizer.json"
BOS = "<|bos|>"
SPECIAL_TOKENS = (
    BOS,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
# The pattern backtracks over a run of whitespace, on a stack that ends near a million characters.
_PIECE_CHARS = 100_000


class Tokenizer:
    """A vocabulary: ordinary tokens (`ranks`: bytes -> id, from 0), then `SPECIAL_TOKENS`."""

    def __init__(self, ranks: Mapping[bytes, int], *, pattern: str = SPLIT_PATTERN) -> None:
        self._ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
        self._pattern = pattern
        self._special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            name="nanochat",
            pat_str=KNOWN_PATTERNS[pattern],
            mergeable_ranks=self._ranks,
            special_tokens=self._special,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def train(cls, texts: Iterator[str], *, vocab_size: int, pattern: str = SPLIT_PATTERN) -> Self:
        """Learn a vocabulary of exactly `vocab_size` tokens, special ones included.

        `pattern` is one of KNOWN_PATTERNS.

        Raises DataError if the text has too few different words for that many tokens.
        """
        import rustbpe  # only to learn a vocabulary: a machine that trains on tokens needs none

        learnt = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] - compiled
        num_ordinary = vocab_size - len(SPECIAL_TOKENS)
        if num_ordinary < 256:
            raise DataError(
                f"a vocabulary of {vocab_size} is too small",
                hint=f"bytes and special tokens alone need {256 + len(SPECIAL_TOKENS)}",
            )
        fast = KNOWN_PATTERNS[pattern]
        learnt.train_from_iterator(texts, num_ordinary, pattern=fast)
        ranks = {bytes(token): rank for token, rank in learnt.get_mergeable_ranks()}
        if len(ranks) < num_ordinary:
            raise DataError(
                f"the text gives {len(ranks) + len(SPECIAL_TOKENS)} tokens, "
                f"{vocab_size} were asked for",
                hint="use more text or a smaller tokenizer.vocab_size",
            )
        return cls(ranks, pattern=pattern)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote. Raises ModelError if `directory` holds no such tokenizer."""
        settings = _read_settings(directory / SETTINGS_FILE)
        ranks = _read_ranks(directory / RANKS_FILE)
        num_ordinary = settings["vocab_size"] - len(SPECIAL_TOKENS)
        if len(ranks) != num_ordinary or sorted(ranks.values()) != list(range(num_ordinary)):
            raise ModelError(
                f"{directory / RANKS_FILE} has {len(ranks)} tokens, "
                f"{SETTINGS_FILE} next to it says {num_ordinary}"
            )
        # Any byte can occur in text, and tiktoken panics at one that has no token.
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise ModelError(f"{directory / RANKS_FILE} has no token for some byte")
        return cls(ranks, pattern=settings["pattern"])

    def save(self, directory: Path) -> None:
        """Write the two files into `directory`, each whole or not at all."""
        # fsync before rename, or a power cut could leave a renamed but empty file. The settings
        # come last: a directory without them is no tokenizer.
        temporary = directory / f".{RANKS_FILE}.{os.getpid()}.tmp"
        with temporary.open("wb") as file:
            file.write(self._ranks_bytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / RANKS_FILE)
        sync_directory(directory)
        write_json(directory / SETTINGS_FILE, self._settings())

    @property
    def ranks(self) -> dict[bytes, int]:
        """The ordinary tokens and their ids, in order of id."""
        return dict(self._ranks)

    @property
    def pattern(self) -> str:
        """The regular expression that splits text; each match is encoded by itself."""
        return self._pattern

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self._ranks) + len(SPECIAL_TOKENS)

    @property
    def bos(self) -> int:
        """The id that begins every document and conversation."""
        return self._special[BOS]

    def check_model(self, vocab_size: int) -> None:
        """Raise ModelError unless a model with `vocab_size` ids fits this tokenizer."""
        if vocab_size != self.vocab_size:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} tokens, the model has {vocab_size}",
                hint="use the tokenizer that the model was trained with",
            )

    def special(self, name: str) -> int:
        """Return the id of one of `SPECIAL_TOKENS`."""
        assert name in self._special, f"{name} is not a special token"
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        """Return ids of `text`, ordinary tokens only: a spelled-out special token stays text."""
        return self._encode(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return ids of each text (n,)."""
        # On this thread: encoding scales with processes, not with tiktoken's own threads.
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`; special tokens appear by name."""
        return self._encoding.decode_bytes(ids)

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Return the number of bytes of each id (vocab_size,); 0 for special tokens."""
        lengths = [len(token) for token in self._ranks] + [0] * len(SPECIAL_TOKENS)
        return np.array(lengths, dtype=np.int32)

    def digest(self) -> str:
        """Return 64 hex digits, equal only for tokenizers that give every text the same ids."""
        settings = json.dumps(self._settings(), sort_keys=True).encode()
        return hashlib.sha256(settings + b"\n" + self._ranks_bytes()).hexdigest()

    def _encode(self, text: str) -> npt.NDArray[np.uint32]:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
            repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encode(repaired)
        except ValueError:  # a run of whitespace deeper than the pattern's stack
            assert len(text) > _PIECE_CHARS
            starts = range(0, len(text), _PIECE_CHARS)
            return np.concatenate([self._encode(text[i : i + _PIECE_CHARS]) for i in starts])

    def _ranks_bytes(self) -> bytes:
        lines = (
            base64.b64encode(token) + f" {rank}\n".encode() for token, rank in self._ranks.items()
        )
        return b"".join(lines)

    def _settings(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "pattern": self._pattern,
            "vocab_size": self.vocab_size,
            "special_tokens": self._special,
        }


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.parent} holds no tokenizer: {error}") from error
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise ModelError(
            f"{path} is not of format {FORMAT}",
            hint="it was written by another version of nanochat-flows, or is no tokenizer of it",
        )
    special, pattern = settings.get("special_tokens"), settings.get("pattern")
    if not isinstance(special, dict) or tuple(special) != SPECIAL_TOKENS:
        raise ModelError(f"{path} has other special tokens than this version of nanochat-flows")
    if not isinstance(pattern, str) or type(settings.get("vocab_size")) is not int:
        raise ModelError(f"{path} has no split pattern or no vocab_size")
    if pattern not in KNOWN_PATTERNS:
        raise ModelError(
            f"{path} has a split pattern that this version does not know: it might take minutes "
            "for a short text",
            hint="a model with this tokenizer cannot be used here; use one whose tokenizer splits "
            "text as nanochat's does, or train one",
        )
    return settings


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return ranks
