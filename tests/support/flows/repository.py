"""Copies of our packages, and git repositories out of reach of this machine's configuration."""

import os
import shutil
import subprocess
from pathlib import Path

from flows.identity.fingerprint import PACKAGES, REPOSITORY

_SETTINGS = ("user.name=Ann", "user.email=ann@example.org", "commit.gpgsign=false", "gc.auto=0")


def copy_packages(root: Path) -> Path:
    """Copy our packages to `root`, with their bytecode: it holds for files of the same times.

    What another process is writing (x.pyc.140234) is left out.
    """
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignore)
    return root


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
