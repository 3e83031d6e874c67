"""Find vocabularies in tiktoken's cache without downloading any.

tiktoken itself downloads a missing file whenever an encoding is used.
"""

import hashlib
import os
import tempfile
from pathlib import Path


def find_cached(url: str, *, sha256: str) -> Path | None:
    """Return the file that tiktoken would read for `url`; None if it would download it."""
    # tiktoken names a cached file by the sha1 of its URL.
    path = _directory() / hashlib.sha1(url.encode()).hexdigest()
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return path if hashlib.sha256(data).hexdigest() == sha256 else None


def _directory() -> Path:
    """Return tiktoken's cache directory, as versions 0.9 to 0.14 choose it."""
    fallback = os.environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", fallback))
