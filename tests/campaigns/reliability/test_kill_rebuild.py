"""Rebuilds ended at random moments: a tagged model is never lost, and the rebuild can be finished.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of rebuilds.
"""

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from flows.gc.collect import collect
from flows.gc.reach import Rules
from infra.storage.files import sha256_of
from infra.storage.local import LocalStore
from tests.campaigns.end_to_end.small import DEPTH, SETTINGS
from tests.support.campaigns import Campaign
from tests.support.reliability.kills import Home, kill_tree

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

_SET = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
RECIPE = ["tiny", "--depth", str(DEPTH), *_SET, "--place", "threads=1"]
RUN = ["run", *RECIPE, "--name", "mine"]
REBUILDS = {
    "--force rl": [*RUN, "--force", "rl"],
    "--force pretrain": [*RUN, "--force", "pretrain"],
    "--from-stage midtrain": [*RUN, "--from-stage", "midtrain"],
    "stage --force": ["stage", "tiny", "rl", *RECIPE[1:], "--force"],
    "revoke": RUN,
}
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
DAY = 86400.0


def test_a_rebuild_that_is_ended_costs_no_tagged_model(tmp_path: Path, campaign: Campaign) -> None:
    home, rng, met = Home(tmp_path / "home"), random.Random(campaign.seed), Counter[str]()
    began = time.monotonic()
    home.run(*RUN)
    longest = time.monotonic() - began
    home.run("tag", "main", "mine")
    model = fetch(home, tmp_path / "fetched" / "before")
    assert model is not None
    for trial in range(campaign.trials(6)):
        what = rng.choice(list(REBUILDS))
        target = tmp_path / "fetched" / str(trial)
        tagged = None if what == "revoke" else model  # what the tag means from now on
        if what == "revoke":
            home.run("revoke", "rl@main", "--why", "a trial")
        process, how = home.start(REBUILDS[what]), rng.choice(ENDINGS)
        seconds = rng.uniform(1.0, longest)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds / 2)
        check(home, target / "during", tagged)
        try:
            process.wait(seconds / 2)
            met["ended by itself"] += 1
            home.run("tag", "main", "mine")
            tagged = model
        except subprocess.TimeoutExpired:
            kill_tree(process, how)
            met[how.name] += 1
        met[what] += 1
        check(home, target / "after", tagged)
        if rng.random() < 0.5:
            collect_garbage(home)
            check(home, target / "collected", tagged)
            met["collected"] += 1
        if rng.random() < 0.5 or what == "revoke":
            home.run(*RUN)
            home.run("tag", "main", "mine")
            tagged = model
            check(home, target / "finished", tagged)
            met["finished"] += 1
    home.run("down")
    campaign.found(dict(met))


def check(home: Home, target: Path, tagged: dict[str, str] | None) -> None:
    """The tag means the model that it meant, or a command says why there is none."""
    assert fetch(home, target) == tagged
    code = 1 if tagged is None else 0
    home.run("chat", "main", "--prompt", "1+1=", "--max-tokens", "4", code=code)


def fetch(home: Home, target: Path) -> dict[str, str] | None:
    """Return the sha256 of the files of the model that the tag means. None if it is refused."""
    if "error:" in home.run("fetch", "main", "--to", str(target), code=None):
        return None
    files = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): sha256_of(path) for path in files}


def collect_garbage(home: Home) -> None:
    """Collect twice, as if weeks had passed."""
    for days in (10.0, 20.0):
        now = time.time() + days * DAY
        collect(
            LocalStore(home.path / "store"),
            Rules(keep=DAY, grace=3600.0),
            threads=2,
            clock=lambda now=now: now,
            watch=lambda what, n: None,
            log=print,
        )
