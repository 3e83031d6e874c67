"""Two `nanochat stage` of one artifact in one store: raced, killed, asleep past the lease.

They share a home or have their own, and are in containers (PID namespaces) or of two users in
turns. The artifact is that of one of them, and what an owner that slept does changes nothing. The
figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of owners that sleep past a short
lease, and of the pairs that start at once.
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
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli.train.stage import LOST
from infra.storage.base import Store
from infra.storage.files import try_flock
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from tests.conftest import BUCKET
from tests.support.campaigns import Campaign
from tests.support.flows.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)

AT_ONCE = 4  # pairs of commands
SECONDS = 400.0  # for a command to do what takes seconds on an idle machine
SHORT_TTL = 3.0
SETTINGS = {"shards.num_shards": 1, "tokenizer.vocab_size": 2000, "model.vocab_size": 2000}
# The product's command. SHORT gives it other intervals, NO_FENCE has it take any lease for its own.
START = f"""
import os, sys
from flows.leases import held_lease as leases
if "SHORT" in os.environ:
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
    "one home": ((), ()),
    "homes, S3": ((), ()),
}


def command(stage: str, home: Path) -> list[str]:
    """Return the words of `nanochat stage tiny STAGE` in a home, which Python is given."""
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    stage_words = ["stage", "tiny", stage, "--depth", "1", *settings, "--home", str(home)]
    return [sys.executable, "-P", "-c", START, *stage_words]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANOCHAT_"))}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", **more}


def has_stopped(pid: int) -> bool:
    """Return whether no thread of a process runs: one in a system call ends that call first."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)


class Pair:
    """The homes, the store, and the two commands that build a tokenizer in it."""

    def __init__(self, directory: Path, shards: Path, place: str, **variables: str) -> None:
        self.directory, self.place, self.variables = directory, place, variables
        self.commands: list[subprocess.Popen[bytes]] = []
        store = directory / "store"
        shutil.copytree(shards, store)
        self.store: Store = LocalStore(store)
        if place == "homes, S3":
            self.store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
            for entry in LocalStore(store).list(""):
                self.store.upload(entry.key, store / entry.key)
        if place == "users":
            for path in (directory, store, *store.rglob("*")):
                os.chown(path, USERS[0], GROUP)
                if path.is_dir():
                    path.chmod(0o2775)

    def start(self, number: int) -> None:
        """Start the command in a home."""
        home = self.directory / f"home-{0 if self.place == 'one home' else number}"
        home.mkdir(exist_ok=True)
        if self.place == "users":
            os.chown(home, USERS[number], GROUP)
        words = [*PLACES[self.place][number], *command("tokenizer", home)]
        with (self.directory / f"{number}.log").open("ab") as log:
            self.commands.append(
                subprocess.Popen(
                    [*words, "--store", self.store.url],
                    env=environment(HOME=str(home), **self.variables),
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def said(self, number: int) -> str:
        return (self.directory / f"{number}.log").read_text()

    def record(self, name: str) -> dict[str, Any] | None:
        """Return `lease` or `manifest` of the artifact."""
        keys = [entry.key for entry in self.store.list("tokenizer/")]
        found = [key for key in keys if key.endswith(f"/{name}.json")]
        return json.loads(self.store.get(found[0])) if found else None

    def is_swapping(self) -> bool:
        """Return whether a process has the lock of the directory's swaps."""
        lock = self.directory / "store" / ".tmp" / "swap.lock"
        if not lock.exists():
            return False
        with lock.open() as file:
            return not try_flock(file)

    def wait_for_owner(self, epoch: int) -> None:
        """Wait until the lease has this epoch."""

        def find() -> dict[str, Any] | None:
            lease = self.record("lease")
            return lease if lease and lease["epoch"] >= epoch else None

        wait_until(find, seconds=SECONDS, what=f"owner {epoch} in {self.directory}")

    def signal_tree(self, number: int, what: int, *, with_job: bool = True) -> None:
        """Send a signal to a command and to its job, which may have ended; wait until it acts."""
        if self.commands[number].poll() is not None:
            return
        process = psutil.Process(self.commands[number].pid)
        tree = [process, *process.children(recursive=True)]
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                if with_job or "nanochat_core.worker" not in each.cmdline():
                    each.send_signal(what)
                    if what == signal.SIGSTOP:
                        wait_until(lambda each=each: has_stopped(each.pid), seconds=SECONDS)

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


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory that other users may enter: pytest closes its own to them at each start."""
    with tempfile.TemporaryDirectory(prefix="two-commands-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the shards that the tokenizer reads."""
    directory = tmp_path_factory.mktemp("shards")
    words = command("shards", directory)
    subprocess.run(words, env=environment(), cwd=directory, check=True)
    return directory / "store"


def let_sleep(pair: Pair, chance: random.Random, *, published_first: bool) -> list[str] | None:
    """Have one owner sleep until the other took over; return faults, None if it does not count.

    It does not if the owner had published, or had the lock of the directory's swaps.
    """
    moment, with_job = chance.uniform(0.0, 3.0), chance.random() < 0.5
    pair.start(0)
    pair.wait_for_owner(1)
    try:
        pair.commands[0].wait(moment)
    except subprocess.TimeoutExpired:
        pair.signal_tree(0, signal.SIGSTOP, with_job=with_job)
    if pair.record("manifest") is not None or pair.is_swapping():
        pair.signal_tree(0, signal.SIGCONT)
        pair.end(0)
        return None
    pair.start(1)
    pair.wait_for_owner(2)
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


def many(rounds: int, play: Callable[[int], list[str]]) -> list[str]:
    """Play rounds, several at once; return the faults."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [fault for faults in pool.map(play, range(rounds)) for fault in faults]


def sleep_rounds(
    directory: Path,
    shards: Path,
    places: Sequence[str],
    *,
    rounds: int,
    seed: int,
    **variables: str,
) -> list[str]:
    """Let so many owners sleep past a short lease, in these places in turns; return the faults."""

    def play(number: int) -> list[str]:
        chance, place = random.Random(seed * 1_000_000 + number), places[number % len(places)]
        for tries in itertools.count():
            pair = Pair(directory / f"{number}-{tries}", shards, place, SHORT="1", **variables)
            found = let_sleep(pair, chance, published_first=number % 2 == 0)
            if not found:
                shutil.rmtree(pair.directory)
            if found is not None:
                return [f"round {number}, {place}: {fault}" for fault in found]
        raise AssertionError

    return many(rounds, play)


@is_root
def test_owners_that_sleep_past_their_lease_publish_nothing(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    places, rounds = ["homes", "users", "containers", "container and host"], campaign.trials(12)
    found = sleep_rounds(tmp_path, shards, places, rounds=rounds, seed=campaign.seed)
    campaign.found(f"{rounds} slept, {len(found)} faults")
    assert found == []


def test_without_the_fence_they_do(tmp_path: Path, shards: Path) -> None:
    assert sleep_rounds(tmp_path, shards, ["homes"], rounds=2, seed=1, NO_FENCE="1")


@is_root
def test_owners_that_were_killed_are_replaced_at_once_or_after_the_lease_of_a_container(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    places = ["homes", "containers", "container and host", "users"]

    def kill(number: int) -> list[str]:
        place = places[number]
        pair = Pair(tmp_path / f"{number}", shards, place)
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
        return [f"{place}: {fault}" for fault in faults]

    found = many(len(places), kill)
    campaign.found(f"{len(places)} killed, {len(found)} faults")
    assert found == []


@is_root
@pytest.mark.usefixtures("s3_store")  # its environment is that of the commands
def test_of_two_commands_at_once_one_builds(
    tmp_path: Path, shards: Path, campaign: Campaign
) -> None:
    def race(number: int) -> list[str]:
        place = [*PLACES][number % len(PLACES)]
        pair = Pair(tmp_path / str(number), shards, place)
        for home in (0, 1):
            pair.start(home)
        codes = [pair.end(home) for home in (0, 1)]
        built = sum("\nbuilt " in pair.said(home) for home in (0, 1))
        faults = pair.faults(owner=1)
        if codes != [0, 0] or built != 1:
            faults.append(f"{codes}, {built} built: {pair.said(0)} {pair.said(1)}")
        return [f"{place}: {fault}" for fault in faults]

    pairs = campaign.trials(12)
    found = many(pairs, race)
    campaign.found(f"{pairs} pairs in {len(PLACES)} places, {len(found)} faults")
    assert found == []
