"""The user's cache directory, as the XDG base directory specification defines it."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return this program's folder in the user's cache; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The specification requires that a path which is not absolute be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "nanochat-flows"
