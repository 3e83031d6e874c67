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
from tests.support.reliability import kills

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
    home = Tagged(tmp_path / "home")
    home.run(*RUN)
    home.tag()
    home.model = home.fetch("before")
    assert home.model is not None
    lasts = {name: home.time(argv) for name, argv in REBUILDS.items() if name != "revoke"}
    lasts["revoke"] = lasts["--force rl"]
    rng = random.Random(campaign.seed)
    met: Counter[str] = Counter()
    for trial in range(campaign.trials(6)):
        what = rng.choice(list(REBUILDS))
        home.is_revoked = what == "revoke"
        if home.is_revoked:
            home.run("revoke", "rl@main", "--why", "a trial")
        how, seconds = rng.choice(ENDINGS), rng.uniform(0.1, 0.95) * lasts[what]
        met[home.end(REBUILDS[what], how, after=seconds, trial=trial)] += 1
        met[what] += 1
        home.check(f"{trial}-after")
        if rng.random() < 0.5:
            home.collect()
            home.check(f"{trial}-collected")
            met["collected"] += 1
        if rng.random() < 0.5 or home.is_revoked:
            home.run(*RUN)
            home.tag()
            home.check(f"{trial}-finished")
            met["finished"] += 1
    home.run("down")
    campaign.found(dict(met))


class Tagged(kills.Home):
    """A home with a tagged run."""

    is_revoked = False
    model: dict[str, str] | None = None  # file -> sha256, of the model that the tag means

    def tag(self) -> None:
        """Point the tag at the newest finished run; it named what was revoked until now."""
        self.run("tag", "main", "mine")
        self.is_revoked = False

    def time(self, argv: list[str]) -> float:
        """Return the seconds that a rebuild takes which is left alone."""
        began = time.monotonic()
        self.run(*argv)
        return time.monotonic() - began

    def fetch(self, name: str) -> dict[str, str] | None:
        """Return the files of the model that the tag means. None if it is refused."""
        target = self.path.parent / "fetched" / name
        said = self.run("fetch", "main", "--to", str(target), code=None)
        if "error:" in said:
            return None
        files = [path for path in target.rglob("*") if path.is_file()]
        return {str(path.relative_to(target)): sha256_of(path) for path in files}

    def check(self, name: str) -> None:
        """The tag means the model that it meant, or a command says why there is none."""
        found = self.fetch(name)
        assert found == (None if self.is_revoked else self.model)
        code = 1 if self.is_revoked else 0
        exported = str(self.path.parent / "exported" / name)
        self.run("fetch", "main", "--to", exported, "--as", "safetensors", code=code)
        self.run("chat", "main", "--prompt", "1+1=", "--max-tokens", "4", code=code)
        assert "error" not in self.run("plan", *RECIPE, code=None)

    def end(self, argv: list[str], how: signal.Signals, *, after: float, trial: int) -> str:
        """Start a command, look at the model, end it; return what happened."""
        process = self.start(argv)
        began = time.monotonic()
        if trial % 2:
            time.sleep(after / 2)
            found = self.fetch(f"{trial}-during")
            assert found == (None if self.is_revoked else self.model)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, after - (time.monotonic() - began)))
            self.tag()
            return "ended by itself"
        kills.kill_tree(process, how)
        return how.name

    def collect(self) -> None:
        """Collect garbage twice, as if weeks had passed."""
        store = LocalStore(self.path / "store")
        rules = Rules(keep=DAY, grace=3600.0)
        for days in (10.0, 20.0):
            now = time.time() + days * DAY
            collect(
                store,
                rules,
                threads=2,
                clock=lambda now=now: now,
                watch=lambda what, n: None,
                log=print,
            )
