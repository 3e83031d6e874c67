"""The folder for what can be made again, as the XDG base directory specification names it."""

import os
from pathlib import Path


def user_cache() -> Path:
    """This program's folder in the user's cache; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a path that is not absolute is to be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "nanochat-flows"
