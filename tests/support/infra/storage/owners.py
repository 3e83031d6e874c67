"""The files of a directory store, also as of a user: fetches of root in tests share none."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from infra.storage.base import Store

USER = 1000  # any but root


def own_as_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make all files below belong to a user, and this process take itself for that user."""
    if (user := os.geteuid()) == 0:
        user = USER
        for path in directory.rglob("*"):
            os.chown(path, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    return user


def path_of(store: Store, key: str) -> Path:
    """Return the path of an object's own file in a directory store."""
    return Path(unquote(urlsplit(store.url).path)) / key
