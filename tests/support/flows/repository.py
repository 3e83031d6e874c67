"""A git repository of a test, out of reach of this machine's git configuration."""

import os
import subprocess
from pathlib import Path

_SETTINGS = ("user.name=Ann", "user.email=ann@example.org", "commit.gpgsign=false", "gc.auto=0")


def git(root: Path, *arguments: str) -> str:
    """What git says."""
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    done = subprocess.run(
        ["git", "-C", str(root), *settings, *arguments],
        env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit_all(root: Path) -> str:
    """Commit everything in `root`, which becomes a repository if need be; the commit's name."""
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
        (root / ".gitignore").write_text("__pycache__\n")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "a version")
    return git(root, "rev-parse", "HEAD")
