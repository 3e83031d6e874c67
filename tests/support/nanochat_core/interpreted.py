"""Triton's kernels without a GPU: in its interpreter, or in its compiler."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def check_interpreted(file: str, *options: str) -> None:
    """Assert that the tests in a file of tests/support/nanochat_core pass in the interpreter."""
    path = f"tests/support/nanochat_core/{file}"
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", path, *options
    ended = run_python(*words, TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
