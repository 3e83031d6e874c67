"""What tests of files for other programs (compose, kubectl, sbatch, sky) ask about them all."""

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError

from flows.cli.app import make_app
from nanochat_core.job import Resources

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
PACKAGES = ("deployments", "flows", "infra", "nanochat_core", "tasks")
# What a run needs between being asked to stop and being killed: workers save, and then the last
# checkpoint goes to the store.
MIN_GRACE = Resources.grace_seconds + 60
UID = "10001"  # of the image's user
SECRET = re.compile(r"PASSWORD|SECRET_ACCESS_KEY|ACCESS_KEY_ID|AUTH_STRING|PREFECT_AUTH|API_KEY")


def mistake(words: Sequence[str]) -> str | None:
    """What our command line says against `nanochat ...`, or None when it takes these words."""
    assert words[0] == "nanochat", words
    try:
        make_app().parse_args(words[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error) or type(error).__name__
    return None


@functools.cache
def ours() -> frozenset[str]:
    """Every variable that our code names."""
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return frozenset(
        found
        for path in sources
        for found in re.findall(r'"(NANOCHAT_\w+)"', path.read_text(encoding="utf-8"))
    )


def named(text: str, prefix: str = "") -> list[str]:
    """Variables of ours, of Prefect's and of AWS's that a text names."""
    return sorted(set(re.findall(rf"\b{prefix}(?:NANOCHAT|PREFECT|AWS)_[A-Z0-9_]+\b", text)))


def leaves(tree: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a document with the keys and places that lead to it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, *path, str(key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from leaves(value, *path, str(place))
    else:
        yield path, tree
