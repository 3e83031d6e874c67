"""Objects of an ordinary user, also where root runs the tests: root's fetches share no bytes."""

import os
from pathlib import Path

import pytest

USER = 1000  # any but root


def own_as_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make all files below belong to a user, and this process take itself for that user."""
    if (user := os.geteuid()) == 0:
        user = USER
        for path in directory.rglob("*"):
            os.chown(path, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    return user
