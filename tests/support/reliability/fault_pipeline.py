"""A run over a network that breaks: the same artifacts in the end, or one clear error.

Two stages are built by flows.building.build over an S3 server that misbehaves. Only the launch of
jobs is replaced: a toy job runs in this process, because what is tried here is every request to the
store. A run waits for a store that does not answer; it is stopped a moment later. Its output
follows from all bytes of its inputs, so that damage which is not found changes the digests at the
end. One output goes up and comes down in several parts. Whatever happens:

- it ends with the digests of an undisturbed run, or with one line that says what is wrong and a
  hint; never with others, never with a traceback;
- no reader sees an artifact that is not whole, whenever the process ends (in mid-run: the
  simulation);
- the store is not stormed: at most eight times the requests of an undisturbed run;
- the same run without faults, given again, ends well.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import flows.building.build
import flows.building.job
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from flows.stages import Stage
from infra.retry import RetryPolicy
from infra.storage.base import Store
from infra.storage.s3 import client
from infra.storage.s3.store import S3Store
from nanochat_core.errors import NanochatError
from nanochat_core.job import Job, Result
from nanochat_core.runtime.progress import Progress
from tests.support.flows.fixtures import Toys
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import set_part
from tests.support.infra.storage.misbehaviour import (
    NETWORK_FAULTS,
    Fault,
    Kind,
    Request,
)
from tests.support.infra.storage.s3_server import client_environment
from tests.support.reliability.verdict import find_artifact

BUCKET = "faults"
MAX_REQUESTS = 8.0  # times those of a run without faults
_PART = 64 << 10  # bytes
_SIZES = {"value.json": 400, "weights/a.bin": 7_000}  # bytes
_LARGE = {"weights/b.bin": 5 * _PART // 2}  # of the first stage
_READ_SECONDS = 0.8  # the client's read timeout; the server drips for less
# So that a job of a few hundredths of a second renews its lease.
_TERMS = LeaseTimings(beat=0.03, poll=0.3, max_poll=0.6)
PATIENCE_OF_A_PERSON = 2.0  # seconds: then the run that waits for its store is stopped
_JOB_SECONDS = 0.05
# Verbs of the requests that a kind can break: others have no body, or are no write.
_VERBS = {
    **dict.fromkeys((Kind.FLIP, Kind.SHORTEN, Kind.CUT), "(GET|POST).*"),
    **dict.fromkeys((Kind.FLIP_REQUEST, Kind.REPLAY), "(PUT|POST).*"),
    Kind.STALE: "(GET|HEAD).*",
}
_STORMS = 7  # one of so many runs is a storm
_RATES = (0.02, 0.3)  # of requests that a storm breaks
PATIENCE = RetryPolicy(tries=8, first_wait=0.01, longest_wait=0.05, deadline=20.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run with faults ended, and what was found after it."""

    fired: tuple[tuple[int, Kind, Request], ...]
    verbs: Mapping[str, int]  # how many requests of each
    ratio: float  # of their number to that of a run without faults
    ended: str  # "same", "error", or what is wrong: "different", "unclear"
    said: str  # the error
    partial: tuple[str, ...]  # manifests that a reader could see, and that were not whole
    again: str | None  # why a run without faults failed afterwards; None: same digests

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        is_known = self.ended in ("same", "error") and self.ratio <= MAX_REQUESTS
        return is_known and not self.partial and self.again is None


@dataclass
class Pipeline:
    """Where runs take place; see `open_pipeline`."""

    directory: Path
    fake: FakeS3
    clients: Mapping[bool, Any]  # by whether faults happen to their requests
    stages: Sequence[Stage]
    digests: Mapping[str, str] = field(default_factory=dict)  # of a run without faults
    calm: Mapping[str, int] = field(default_factory=dict[str, int])  # its requests by verb

    def run(
        self,
        *faults: Fault,
        storm: float = 0.0,
        seed: int = 0,
        retry_policy: RetryPolicy = PATIENCE,
    ) -> Outcome:
        """Build everything with faults; look at the server; build again without."""
        prefix, home = uuid.uuid4().hex, self.directory / uuid.uuid4().hex
        home.mkdir()
        store = self._open(prefix, retry_policy, meets_faults=True)
        direct = self._open(prefix, RetryPolicy(tries=8), meets_faults=False)
        self.fake.arm(*faults, storm=storm, seed=seed)
        ended, said = self._build(store, home)
        verbs = Counter(request.verb for request in self.fake.requests)
        fired = tuple(self.fake.fired)
        self.fake.settle()
        partial = find_partial(direct)
        self.fake.arm()
        again, why = self._build(store, home)
        shutil.rmtree(home)
        return Outcome(
            fired=fired,
            verbs=verbs,
            ratio=verbs.total() / sum((self.calm or verbs).values()),
            ended=ended,
            said=said,
            partial=tuple(partial),
            again=None if again == "same" else why or again,
        )

    def _open(self, prefix: str, retry_policy: RetryPolicy, *, meets_faults: bool) -> S3Store:
        store = S3Store(f"s3://{BUCKET}/{prefix}", retry_policy=retry_policy)
        store.client = self.clients[meets_faults]  # to make one takes longer than a run
        # The referee's own requests meet no faults, only a machine that is busy.
        store.has_accepted = not meets_faults
        store.faults = ()  # of its conditions, which were tried before
        return store

    def _build(self, store: Store, home: Path) -> tuple[str, str]:
        """How it ended, and the error in full."""
        toys = Toys(root=self.directory / "root", home=home)
        stop = threading.Event()
        person = threading.Timer(PATIENCE_OF_A_PERSON, stop.set)

        def watch(stage: str, event: dict[str, Any]) -> None:
            if "store not reached" in event.get("text", "") and person.ident is None:
                person.start()

        context = replace(toys.context(), store=store, terms=_TERMS, stop=stop, watch=watch)
        built: dict[str, Manifest] = {}
        try:
            for stage in self.stages:
                inputs = {source.name: built[source.name] for source in stage.inputs}
                built[stage.name] = flows.building.build.build(
                    stage, context, inputs, force=False
                ).manifest
        except NanochatError as error:
            is_clear = "\n" not in str(error) and bool(error.hint)
            return "error" if is_clear else "unclear", f"{error} | hint: {error.hint}"
        except Exception as error:  # noqa: BLE001 - a person would see a traceback
            return "unclear", f"{type(error).__name__}: {error}"
        finally:
            person.cancel()
        digests = {name: manifest.digest for name, manifest in built.items()}
        if self.digests and digests != self.digests:
            return "different", f"{digests}"
        self.digests = digests
        return "same", ""


def try_faults(pipeline: Pipeline, *, trials: int, seed: int) -> list[Outcome]:
    """Run so often: with each kind of fault at each request in turn, and some storms.

    In a storm requests break at random.
    """
    chance, outcomes = random.Random(seed), list[Outcome]()
    left: dict[Kind, list[int]] = {}  # requests that a kind has not broken yet
    for number in range(trials):
        kind = NETWORK_FAULTS[(number - number // _STORMS) % len(NETWORK_FAULTS)]
        faults, storm = list[Fault](), 0.0
        if number % _STORMS == _STORMS - 1:
            storm = chance.uniform(*_RATES)
        else:
            verb = _VERBS.get(kind, ".*")
            requests = left.setdefault(kind, [])
            if not requests:
                requests += range(sum(n for v, n in pipeline.calm.items() if re.fullmatch(verb, v)))
                chance.shuffle(requests)
            faults = [Fault(kind=kind, skip=requests.pop(), times=1, verb=verb)]
        outcomes.append(pipeline.run(*faults, storm=storm, seed=chance.randrange(1 << 32)))
    assert any(outcome.fired for outcome in outcomes)
    return outcomes


def find_partial(store: Store) -> list[str]:
    """Every artifact that a reader can see and cannot have."""
    keys = [entry.key for entry in store.list("") if entry.key.endswith("/manifest.json")]
    verdicts = {key: find_artifact(store, *key.split("/")[:2]) for key in keys}
    return [f"{key}: {found.why}" for key, found in verdicts.items() if found.state == "torn"]


def toy_job(job: Job, *, on_event: Any, root: Path, **_: Any) -> Result:
    """A job in this process: its files follow from the bytes of its inputs."""
    source = (root / f"{job.entry.replace('.', '/')}.py").read_bytes()
    job.code.mkdir(parents=True, exist_ok=True)
    (job.code / f"{hashlib.sha256(source).hexdigest()}-{job.entry}").write_bytes(source)
    content = hashlib.sha256(job.stage.encode())
    for name in sorted(job.inputs):
        for path in sorted(path for path in job.inputs[name].rglob("*") if path.is_file()):
            content.update(path.relative_to(job.inputs[name]).as_posix().encode())
            content.update(path.read_bytes())
    chance = random.Random(content.hexdigest())
    for name, size in (_SIZES if job.inputs else {**_SIZES, **_LARGE}).items():
        (job.output / name).parent.mkdir(parents=True, exist_ok=True)
        (job.output / name).write_bytes(chance.randbytes(size))
    job.events.unlink(missing_ok=True)
    progress = Progress(job.events)
    progress.start(1)
    progress.step(1, loss=0.5)
    (job.directory / "worker.log").touch()
    time.sleep(_JOB_SECONDS)
    result = Result(status="finished", metrics={})
    result.write(job.directory)
    return result


@contextlib.contextmanager
def open_pipeline(directory: Path) -> Generator[Pipeline]:
    """Yield a pipeline on a server of its own, after one run without faults."""
    (directory / "root" / "tasks").mkdir(parents=True)
    (directory / "root" / "tasks" / "__init__.py").touch()
    toys = Toys(root=directory / "root", home=directory)
    fake = FakeS3(bucket=BUCKET)
    fake.slow = _READ_SECONDS / 3
    clients = {True: _make_client(fake.endpoint), False: _make_client(fake.calm_endpoint)}
    with pytest.MonkeyPatch.context() as patch:
        set_part(patch.setattr, _PART)
        patch.setattr(flows.building.job, "run_job", toy_job)
        first = toys.stage("first")
        pipeline = Pipeline(directory, fake, clients, (first, toys.stage("second", first)))
        calm = pipeline.run()
        assert (calm.is_good, calm.ended) == (True, "same"), calm
        pipeline.calm = calm.verbs
        yield pipeline
    for made in clients.values():
        made.close()
    fake.stop()


def _make_client(endpoint: str) -> Any:
    seconds = mock.patch.object(client, "READ_SECONDS", _READ_SECONDS)
    with mock.patch.dict(os.environ, client_environment(endpoint)), seconds:
        return client.make_client()
