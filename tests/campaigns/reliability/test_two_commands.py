"""Two `nanochat stage` of one artifact in one store: raced, killed, asleep past the lease.

They have homes of their own, and are in containers (PID namespaces) or of two users in turns. The
artifact is that of one of them, and what an owner that slept does changes nothing. The figures are
in docs/reliability.md. NANOCHAT_TRIALS is the number of owners that sleep past a short lease; eight
more pairs of commands have the product's own.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli.train.stage import LOST
from flows.leases.lease import TTL
from tests.support.campaigns import Campaign
from tests.support.flows.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)

AT_ONCE = 4  # pairs of commands
SECONDS = 400.0  # for a command to do what takes seconds on an idle machine
SHORT_TTL = 3.0
SETTINGS = {"shards.num_shards": 1, "tokenizer.vocab_size": 2000, "model.vocab_size": 2000}
PLAIN = ("-m", "flows.cli.app")
# The product's command, with other intervals; `NO_FENCE` also takes any lease for its own.
SHORT = f"""
import os, sys
from flows.leases import held_lease as leases
new = dict(ttl={SHORT_TTL}, beat=0.3, poll=0.1, max_poll=0.5)
leases.LeaseTimings.__init__.__kwdefaults__.update(new)
if "NO_FENCE" in os.environ:
    leases.HeldLease._is_of = lambda self, record: True
from flows.cli.app import main
sys.exit(main())
"""
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
USERS = (40_001, 40_002)  # without names; both of the group that may write into the store
GROUP = 40_000
# The interpreter may be in root's own directory: other users get a view with nothing else in it.
AS_USER = """
set -e
umask 002
case {python} in /root/*)
  mkdir -p /run/python
  mount --bind {python} /run/python
  mount -t tmpfs -o mode=755 none /root
  mkdir -p {python}
  mount --bind /run/python {python};;
esac
exec setpriv --reuid {user} --regid {group} --clear-groups "$@"
"""
is_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv"))),
    reason="needs root, unshare and setpriv, to make PID namespaces and processes of other users",
)


def as_user(user: int) -> tuple[str, ...]:
    script = AS_USER.format(user=user, group=GROUP, python=sys.base_prefix)
    return ("unshare", "--mount", "sh", "-c", script, "sh")


# How the two commands of a pair are started.
PLACES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "homes": ((), ()),
    "containers": (CONTAINER, CONTAINER),
    "container and host": (CONTAINER, ()),
    "users": (as_user(USERS[0]), as_user(USERS[1])),
}


@dataclass
class Pair:
    """Two homes, one store, and the commands that build in it."""

    directory: Path
    place: str = "homes"
    words: Sequence[str] = PLAIN  # of the interpreter
    environment: dict[str, str] = field(default_factory=dict)
    commands: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, number: int) -> "subprocess.Popen[bytes]":
        """Start `nanochat stage tiny tokenizer` in a home."""
        home = self.directory / f"home-{number}"
        home.mkdir()
        inside = PLACES[self.place][number]
        if self.place == "users":
            os.chown(home, USERS[number], GROUP)
        words = ["stage", "tiny", "tokenizer", "--depth", "1", *settings(), "--home", str(home)]
        with (self.directory / f"{number}.log").open("ab") as log:
            self.commands.append(
                subprocess.Popen(
                    [*inside, sys.executable, "-P", *self.words, *words, "--store", self.store],
                    env={**clean_environment(), "HOME": str(home), **self.environment},
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return self.commands[-1]

    @property
    def store(self) -> str:
        return (self.directory / "store").as_uri()

    def said(self, number: int) -> str:
        return (self.directory / f"{number}.log").read_text()

    def record(self, name: str) -> dict[str, Any] | None:
        """Return `lease` or `manifest` of the artifact."""
        found = [*(self.directory / "store" / "tokenizer").glob(f"*/{name}.json")]
        return json.loads(found[0].read_bytes()) if found else None

    def wait_for_owner(self, epoch: int) -> None:
        """Wait until the lease has this epoch."""

        def find() -> dict[str, Any] | None:
            lease = self.record("lease")
            return lease if lease and lease["epoch"] >= epoch else None

        wait_until(find, seconds=SECONDS, what=f"owner {epoch} in {self.directory}")

    def signal_tree(self, number: int, what: int, *, with_job: bool = True) -> None:
        """Send a signal to a command, and to its job, which may have ended."""
        if self.commands[number].poll() is not None:
            return
        process = psutil.Process(self.commands[number].pid)
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                if with_job or "nanochat_core.worker" not in each.cmdline():
                    each.send_signal(what)

    def end(self, number: int) -> int:
        return self.commands[number].wait(SECONDS)

    def faults(self, *, owner: int) -> list[str]:
        """Return what is wrong after both have ended; `owner` is the epoch of the artifact's."""
        manifest, lease = self.record("manifest"), self.record("lease")
        if manifest is None or lease is None:
            return ["there is no artifact"]
        made = manifest["provenance"]
        named = ["epoch", "owner"] if lease["epoch"] == owner else ["epoch"]
        expected = {"epoch": owner, "owner": lease["owner"]}
        found = [f"{n} is {made[n]}, not {expected[n]}" for n in named if made[n] != expected[n]]
        if made["epoch"] != owner:
            found.append(f"the artifact is of owner {made['epoch']}")
        return found


def clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANOCHAT_"))}
    root = str(Path(__file__).parents[3])
    return {**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def settings() -> list[str]:
    return [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the shards that the tokenizer reads."""
    directory = tmp_path_factory.mktemp("shards")
    words = ["stage", "tiny", "shards", "--depth", "1", *settings(), "--home", str(directory)]
    subprocess.run(
        [sys.executable, "-P", *PLAIN, *words], env=clean_environment(), cwd=directory, check=True
    )
    return directory / "store"


def make_pair(directory: Path, shards: Path, place: str, **more: Any) -> Pair:
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / "store"
    shutil.copytree(shards, store)
    if place == "users":
        for path in (directory, store, *store.rglob("*")):
            os.chown(path, USERS[0], GROUP)
            if path.is_dir():
                path.chmod(0o2775)
        for parent in directory.parents:
            if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp/"):
                parent.chmod(parent.stat().st_mode | 0o011)
    return Pair(directory, place, **more)


def let_sleep(pair: Pair, chance: random.Random, *, published_first: bool) -> list[str] | str:
    """Have one owner sleep until the other took over; return faults, or why it does not count."""
    moment, with_job = chance.uniform(0.0, 3.0), chance.random() < 0.5
    pair.start(0)
    pair.wait_for_owner(1)
    try:
        pair.commands[0].wait(moment)
    except subprocess.TimeoutExpired:
        pair.signal_tree(0, signal.SIGSTOP, with_job=with_job)
    if pair.record("manifest") is not None:
        pair.signal_tree(0, signal.SIGCONT)
        pair.end(0)
        return "it had published"
    pair.start(1)
    is_locked = "is locked by another process"

    def has_taken_over() -> bool:
        lease = pair.record("lease")
        return is_locked in pair.said(1) or (lease is not None and lease["epoch"] == 2)

    wait_until(has_taken_over, seconds=SECONDS, what=f"the next owner in {pair.directory}")
    if is_locked in pair.said(1):
        pair.signal_tree(0, signal.SIGCONT)
        codes = [pair.end(0), pair.end(1)]  # on a busy machine it may lose a short lease now
        assert codes in ([0, 0], [LOST, 0]), pair.said(0) + pair.said(1)
        return "it had the lock of the directory's swaps"
    if published_first:
        assert pair.end(1) == 0, pair.said(1)
    before = pair.record("manifest")
    pair.signal_tree(0, signal.SIGCONT)
    codes = [pair.end(0), pair.end(1)]
    found = pair.faults(owner=2)
    if before is not None and before != pair.record("manifest"):
        found.append("the manifest was changed")
    if codes[1] != 0 or "\nbuilt " in pair.said(0) or codes[0] not in (0, LOST):
        found.append(f"exit codes {codes}: {pair.said(0)[-400:]} {pair.said(1)[-400:]}")
    return found


def many(rounds: int, play: Callable[[int], tuple[int, list[str]]]) -> tuple[int, list[str]]:
    """Play rounds, several at once; return how many tries did not count, and the faults."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = [*pool.map(play, range(rounds))]
    return sum(tries for tries, _ in ends), [fault for _, faults in ends for fault in faults]


def sleep_rounds(
    directory: Path, shards: Path, *, rounds: int, seed: int, places: Sequence[str], **more: Any
) -> tuple[int, list[str]]:
    """Let so many owners sleep, in these places in turns."""

    def play(number: int) -> tuple[int, list[str]]:
        chance = random.Random(seed * 1_000_000 + number)
        for tries in itertools.count():
            place = places[number % len(places)]
            pair = make_pair(directory / f"{number}-{tries}", shards, place, **more)
            found = let_sleep(pair, chance, published_first=number % 2 == 0)
            if not found:
                shutil.rmtree(pair.directory)
            if not isinstance(found, str):
                return tries, [f"round {number}, {place}: {fault}" for fault in found]
        raise AssertionError

    return many(rounds, play)


@is_root
def test_owners_that_sleep_past_a_short_lease_publish_nothing(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    rounds = campaign.trials(12)
    tries, found = sleep_rounds(
        tmp_path,
        shards,
        rounds=rounds,
        seed=campaign.seed,
        places=["homes", "users", "homes", "container and host"],
        words=("-c", SHORT),
    )
    campaign.found(f"{rounds} slept, {len(found)} faults, {tries} more did not count")
    assert found == []


def test_without_the_fence_they_do(tmp_path: Path, shards: Path) -> None:
    _, found = sleep_rounds(
        tmp_path,
        shards,
        rounds=2,
        seed=1,
        places=["homes"],
        words=("-c", SHORT),
        environment={"NO_FENCE": "1"},
    )
    assert found


@is_root
def test_the_leases_of_the_product_expire_only_for_owners_that_sleep_or_died(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    """In each place one owner sleeps for longer than its lease, and one is killed."""
    tries, slept = sleep_rounds(
        tmp_path / "slept",
        shards,
        rounds=len(PLACES),
        seed=campaign.seed,
        places=[*PLACES],
    )

    def kill(number: int) -> tuple[int, list[str]]:
        place = [*PLACES][number]
        pair = make_pair(tmp_path / f"killed-{number}", shards, place)
        pair.start(0)
        pair.wait_for_owner(1)
        pair.signal_tree(0, signal.SIGKILL)
        pair.end(0)
        pair.start(1)
        code = pair.end(1)
        is_late = "waiting: " in pair.said(1)  # a container's process may live: 90 s of silence
        faults = pair.faults(owner=2) if code == 0 else [pair.said(1)]
        if is_late != ("container" in place):
            faults.append(f"{'waited' if is_late else 'did not wait'}: {pair.said(1)}")
        return 0, [f"{place}: {fault}" for fault in faults]

    _, killed = many(len(PLACES), kill)
    campaign.found(f"{len(PLACES)} slept for {TTL:g} s, {tries} more did not count; 4 killed")
    assert slept + killed == []


@is_root
def test_of_two_commands_at_once_one_builds(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    rounds, ends = 2 * len(PLACES), Counter[str]()

    def race(number: int) -> tuple[int, list[str]]:
        place = [*PLACES][number % len(PLACES)]
        pair = make_pair(tmp_path / str(number), shards, place)
        for home in (0, 1):
            pair.start(home)
        codes = [pair.end(home) for home in (0, 1)]
        built = sum("\nbuilt " in pair.said(home) for home in (0, 1))
        ends[f"{place}, built by {built}"] += 1
        faults = pair.faults(owner=1)
        if codes != [0, 0] or built != 1:
            faults.append(f"{codes}, {built} built: {pair.said(0)} {pair.said(1)}")
        return 0, [f"{place}: {fault}" for fault in faults]

    _, found = many(rounds, race)
    campaign.found(dict(ends))
    assert found == []
