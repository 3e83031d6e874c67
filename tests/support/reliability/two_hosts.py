"""Two network namespaces as two hosts, an S3 server in a third: only packets between them.

Each host has a home of its own. `nanochat stage` with torchrun's variables builds a small
`pretrain`, whose inputs are put into the store under the fingerprints that the product asks for.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from flows.artifacts.publish import find_manifest, publish
from flows.identity.fingerprint import REPOSITORY, Code
from flows.identity.manifest import Manifest, identify_from
from flows.identity.ref import ArtifactRef
from flows.profiles import open_profile
from flows.stages import PRETRAIN, ROWS, SHARDS, TOKENIZER, TOKENS
from infra.launch.torchrun import run_job
from infra.storage.base import ObjectNotFound, Store
from infra.storage.files import sha256_of
from infra.storage.open import open_store
from infra.storage.s3.store import S3Store
from nanochat_core.data import row_files
from nanochat_core.runtime.progress import read_events
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.flows.rows import PROVENANCE
from tests.support.flows.waiting import wait_until
from tests.support.infra.storage.s3_server import client_environment, server_environment
from tests.support.small_job import one_thread, small_job

ROOT = Path(__file__).parents[3]
BUCKET = "nanochat"
STORE = f"s3://{BUCKET}/two-hosts"
PORT = 4566
HUB = "10.77.0.1"
SAVE_EVERY = 25
LENGTH, VOCAB = 64, 300
TEXT = "one step after another, and each saved. " * 40 + "".join(map(chr, range(32, 127))) * 4


def overrides(num_steps: int) -> tuple[str, ...]:
    """Return what differs from the profile `tiny`."""
    return (
        f"model.sequence_len={LENGTH}",
        f"model.vocab_size={VOCAB}",
        f"tokenizer.vocab_size={VOCAB}",
        f"rows.sequence_len={LENGTH}",
        f"model.windows=[16,{LENGTH}]",
        f"pretrain.total_batch_size={8 * LENGTH}",
        f"pretrain.eval_tokens={4 * LENGTH}",
        f"pretrain.num_steps={num_steps}",
    )


def words(*, num_steps: int) -> list[str]:
    """Return the command of each node; its environment says which it is."""
    settings = ("threads=1", "device_batch_size=4", f"save_every_steps={SAVE_EVERY}")
    return [
        *(sys.executable, "-m", "flows.cli.app", "stage", "tiny", "pretrain", "--depth", "2"),
        *(word for override in overrides(num_steps) for word in ("--set", override)),
        *(word for setting in settings for word in ("--place", setting)),
        *("--gpus", "0"),
    ]


def reference(directory: Path, num_steps: int) -> dict[str, str]:
    """Return the sha256 of each file that the same job makes with two ranks on one host."""
    tree = open_profile("tiny", depth=2, overrides=overrides(num_steps)).run.tree()
    job = small_job(
        directory / "job",
        entry=PRETRAIN.entry,
        config={name: tree[name] for name in PRETRAIN.config},
        inputs=make_inputs(directory / "inputs"),
        resources=one_thread(device_batch_size=4, save_every_steps=SAVE_EVERY),
    )
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    job.write()
    run_job(job, processes=2, on_event=lambda event: None)
    files = [path for path in sorted(job.output.rglob("*")) if path.is_file()]
    return {str(path.relative_to(job.output)): sha256_of(path) for path in files}


def make_inputs(directory: Path) -> dict[str, Path]:
    """Make rows and a tokenizer; return their directories."""
    tokenizer = Tokenizer.train(iter([TEXT]), vocab_size=VOCAB)
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer")
    rows = np.random.default_rng(1).integers(VOCAB, size=(200, LENGTH + 1)).astype("<u2")
    rows[:, 1::2] = rows[:, :-1:2] // 3  # something to learn
    (directory / "rows").mkdir()
    for split in row_files.SPLITS:
        rows.tofile(directory / "rows" / f"{split}.rows")
    index: dict[str, Any] = {"num_train": len(rows), "num_val": len(rows), "tokens": rows.size}
    index |= {"sequence_len": LENGTH, "dtype": "uint16", "vocab_size": VOCAB}
    index |= {"tokenizer": tokenizer.digest(), "policy": "default", "waste": 0.0}
    row_files.write_index(directory / "rows", index)
    return {name: directory / name for name in ("rows", "tokenizer")}


def seed(store: Store, directory: Path) -> dict[str, Manifest]:
    """Publish what `pretrain` needs, and return it; shards and tokens are of one byte."""
    run = open_profile("tiny", depth=2, overrides=overrides(1)).run
    made = make_inputs(directory / "inputs")
    done: dict[str, Manifest] = {}
    for stage in (SHARDS, TOKENIZER, TOKENS, ROWS):
        output = made.get(stage.name, directory / stage.name)
        if not output.exists():
            output.mkdir()
            (output / "data").write_text("0")
        inputs = {source.name: done[source.name] for source in stage.inputs}
        done[stage.name] = publish(
            store,
            identify_from(stage, run, inputs, code=Code(REPOSITORY)),
            output,
            logs=[],
            inputs=inputs,
            provenance=PROVENANCE,
        ).manifest
    return done


def look(store: Store) -> dict[str, Any]:
    """The artifact's files, and the newest checkpoint."""
    entries = [entry.key for entry in store.list("pretrain/")]
    fingerprints = sorted({key.split("/")[1] for key in entries})
    if not fingerprints:
        return {}
    (fingerprint,) = fingerprints
    manifest = find_manifest(store, ArtifactRef("pretrain", fingerprint))
    commits = [key for key in entries if "/step-" in key and key.endswith("/COMMIT.json")]
    newest = None
    with contextlib.suppress(ObjectNotFound):  # removed meanwhile: the artifact is published
        newest = json.loads(store.get(max(commits))) if commits else None
    return {
        "files": {f.path: f.sha256 for f in manifest.files} if manifest else None,
        "segments": list(manifest.provenance.segments) if manifest else None,
        "step": newest["step"] if newest else 0,
        "parts": sorted(f["path"] for f in newest["files"]) if newest else [],
        "keys": [f["key"] for f in newest["files"]] if newest else [],
        "checkpoints": [key for key in entries if "/checkpoints/" in key],
    }


@dataclasses.dataclass
class Host:
    """One namespace, its home, and the command that runs there."""

    name: str
    number: int
    home: Path
    process: "subprocess.Popen[bytes] | None" = None
    runs: int = 0

    def start(self, command: list[str]) -> None:
        """Start the command here."""
        self.runs += 1
        ours = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")}
        environment = ours | {
            "NANOCHAT_HOME": str(self.home),
            "NANOCHAT_STORE": STORE,
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(self.number),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> Path:
        """What the last command printed."""
        return self.home / f"log-{self.runs}"

    def wait(self, seconds: float) -> int:
        """The command's exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def pids(self) -> list[int]:
        """Every process of this host."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self) -> None:
        """kill -9 of everything, until nothing is left."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait(10)
            time.sleep(0.05)

    def replace(self) -> None:
        """Another machine takes its place: nothing of the home is there."""
        self.home = self.home.with_name(f"{self.home.name}-new")
        self.home.mkdir()

    def plug(self, state: str) -> None:
        """Set its cable "up" or "down"; no process hears that it is down."""
        _ip("netns", "exec", self.name, "ip", "link", "set", "eth0", state)

    def events(self) -> list[dict[str, Any]]:
        """Return the job's events so far, on the host that has rank 0."""
        return [
            event
            for path in self.home.glob("work/pretrain/*/events.jsonl")
            for event in read_events(path)
        ]


Hosts: TypeAlias = tuple[Host, Host, Callable[[], dict[str, Any]]]  # and what the store has


def why_not() -> str | None:
    """Why this machine cannot play two hosts, or None."""
    name = f"nctry{os.getpid()}"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        return f"no `ip` command: {error.strerror}"
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextlib.contextmanager
def two_hosts(directory: Path) -> Generator[Hosts]:
    """Two hosts, a seeded store that both reach, and what looks into it; gone afterwards."""
    hub, *names = (f"nc{os.getpid()}{letter}" for letter in "hab")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in client_environment(f"http://{HUB}:{PORT}").items():
            patch.setenv(name, value)
        for name in (hub, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _wire(hub, names)
        hosts: list[Host] = []
        for number, name in enumerate(names):
            hosts.append(Host(name=name, number=number, home=directory / name[-1]))
            hosts[-1].home.mkdir()
            stack.callback(hosts[-1].kill)
        stack.enter_context(_s3(hub, directory))
        inside = stack.enter_context(ThreadPoolExecutor(1, initializer=_enter, initargs=(hub,)))
        store = inside.submit(_prepare, directory / "seed").result()
        yield hosts[0], hosts[1], lambda: inside.submit(look, store).result()


def _enter(namespace: str) -> None:
    """Put the calling thread, and those that it starts, into a network namespace."""
    with Path(f"/run/netns/{namespace}").open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0


def _prepare(directory: Path) -> Store:
    """Return the store, which has what `pretrain` needs."""
    wait_until(_answers, seconds=60)
    S3Store(f"s3://{BUCKET}").request("create_bucket")
    store = open_store(STORE)
    seed(store, directory)
    return store


def _wire(hub: str, names: list[str]) -> None:
    """A switch in the hub, a cable to each host."""
    inside = ("netns", "exec", hub, "ip")
    _ip(*inside, "link", "add", "switch", "type", "bridge")
    _ip(*inside, "addr", "add", f"{HUB}/24", "dev", "switch")
    for number, name in enumerate(names, 2):
        cable = f"p{number}"
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", cable, "netns", hub)
        _ip(*inside, "link", "set", cable, "master", "switch", "up")
        for setting in (
            ("addr", "add", f"10.77.0.{number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("netns", "exec", name, "ip", *setting)
    for device in ("switch", "lo"):
        _ip(*inside, "link", "set", device, "up")


@contextlib.contextmanager
def _s3(hub: str, directory: Path) -> Iterator[None]:
    data = directory / "s3"
    data.mkdir()
    server = [str(Path(sys.executable).parent / "ministack")]
    environment = server_environment(data, PORT) | {"BIND_HOST": "0.0.0.0"}
    with (data / "server.log").open("wb") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", hub, *server],
            env=environment,
            cwd=data,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _answers() -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://{HUB}:{PORT}/_ministack/health", timeout=2).close()
        return True
    return False
