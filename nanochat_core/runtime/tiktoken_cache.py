"""Vocabularies that tiktoken downloaded earlier, found without downloading any.

tiktoken itself fetches what its cache lacks, at whatever moment somebody names an encoding.
"""

import hashlib
import os
import tempfile
from pathlib import Path


def find_cached(url: str, *, sha256: str) -> Path | None:
    """The file that tiktoken would read for `url`; None when it would go and fetch it."""
    path = _directory() / hashlib.sha1(url.encode()).hexdigest()
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return path if hashlib.sha256(data).hexdigest() == sha256 else None


def _directory() -> Path:
    """As tiktoken 0.9 to 0.14 choose it."""
    fallback = os.environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", fallback))
