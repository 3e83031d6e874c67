"""Two network namespaces as two hosts, an S3 server in a third: only packets between them.

Each host has a home of its own. `nanochat stage` with torchrun's variables builds a small
`pretrain`, whose inputs are put into the store under the fingerprints that the product asks for.

    python -m tests.support.reliability.two_hosts seed STORE DIRECTORY VOCAB    puts them there
    python -m tests.support.reliability.two_hosts look STORE    what the store has, as JSON
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from flows.artifacts.publish import find_manifest, publish
from flows.identity.fingerprint import REPOSITORY, Code
from flows.identity.manifest import Manifest, identify_from
from flows.identity.ref import ArtifactRef
from flows.profiles import open_profile
from flows.stages import PRETRAIN, ROWS, SHARDS, TOKENIZER, TOKENS
from infra.storage.base import ObjectNotFound, Store
from infra.storage.open import open_store
from nanochat_core.job import Job
from nanochat_core.runtime.progress import read_events
from tests.support.flows.rows import PROVENANCE
from tests.support.flows.waiting import wait_until
from tests.support.infra.storage.s3_server import client_environment, server_environment
from tests.support.reliability import small_training

ROOT = Path(__file__).parents[3]
BUCKET = "nanochat"
STORE = f"s3://{BUCKET}/two-hosts"
PORT = 4566
HUB = "10.77.0.1"
SAVE_EVERY = 25
LARGE_VOCAB = 65_536
# 15 tables of 65,536 x 256, 13 of them value embeddings: 2 GB of AdamW's two moments in fp32.
LARGE = ("model.depth=26", "model.width=256", "model.num_heads=4", "model.num_kv_heads=4")


def overrides(num_steps: int, vocab: int = small_training.VOCAB) -> tuple[str, ...]:
    """Return what differs from the profile `tiny`; LARGE_VOCAB gives 2 GB of optimizer state."""
    large = vocab == LARGE_VOCAB
    windows = ",".join(["16"] * (25 if large else 1))
    return (
        f"model.sequence_len={small_training.LENGTH}",
        f"model.vocab_size={vocab}",
        f"tokenizer.vocab_size={vocab}",
        f"rows.sequence_len={small_training.LENGTH}",
        f"model.windows=[{windows},{small_training.LENGTH}]",
        f"pretrain.total_batch_size={small_training.ROWS_PER_STEP * small_training.LENGTH}",
        f"pretrain.eval_tokens={4 * small_training.LENGTH}",
        *(LARGE if large else ()),
        f"pretrain.num_steps={num_steps}",
    )


def words(
    *,
    num_steps: int,
    place: tuple[str, ...] = (),
    vocab: int = small_training.VOCAB,
    save_every: int = SAVE_EVERY,
) -> list[str]:
    """The command of each node; its environment says which it is."""
    settings = ("threads=1", "device_batch_size=4", f"save_every_steps={save_every}", *place)
    changed = overrides(num_steps, vocab)
    return [
        *(sys.executable, "-m", "flows.cli.app", "stage", "tiny", "pretrain", "--depth", "2"),
        *(word for override in changed for word in ("--set", override)),
        *(word for setting in settings for word in ("--place", setting)),
        *("--gpus", "0"),
    ]


def reference(directory: Path, num_steps: int) -> Job:
    """The same job for one host."""
    run = open_profile("tiny", depth=2, overrides=overrides(num_steps)).run
    sections = {name: getattr(run, name) for name in PRETRAIN.config}
    job = small_training.make_job(
        directory / "job", small_training.make_inputs(directory / "inputs"), num_steps=num_steps
    )
    config = {n: s.tree() if hasattr(s, "tree") else s for n, s in sections.items()}
    return dataclasses.replace(job, config=config)


def seed(store: Store, directory: Path, vocab: int = small_training.VOCAB) -> dict[str, Manifest]:
    """Publish what `pretrain` needs, and return it; shards and tokens are of one byte."""
    run = open_profile("tiny", depth=2, overrides=overrides(1, vocab)).run
    made = small_training.make_inputs(directory / "inputs", vocab)
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
        "bytes": {f["path"]: f["size"] for f in newest["files"]} if newest else {},
        "checkpoints": [key for key in entries if "/checkpoints/" in key],
    }


@dataclasses.dataclass
class Host:
    """One namespace, its home, and the command that runs there."""

    name: str
    address: str
    home: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    runs: int = 0

    def start(self, command: list[str]) -> None:
        """Start the command here."""
        self.runs += 1
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=self.environment,
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
        self.environment = {**self.environment, "NANOCHAT_HOME": str(self.home)}

    def plug(self, state: str) -> None:
        """Set its cable "up" or "down"; no process hears that it is down."""
        _ip("netns", "exec", self.name, "ip", "link", "set", "eth0", state)

    def limit(self, megabytes: int) -> None:
        """Let the host send at most this many MB a second to the store; ranks are not slowed."""
        for words in (
            "qdisc add dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb rate 10gbit",
            f"class add dev eth0 parent 1: classid 1:2 htb rate {8 * megabytes}mbit",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {HUB}/32 flowid 1:2",
        ):
            _ip("netns", "exec", self.name, "tc", *words.split())

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
def two_hosts(directory: Path, vocab: int = small_training.VOCAB) -> Generator[Hosts]:
    """Two hosts, a seeded store that both reach, and what looks into it; gone afterwards."""
    hub, *names = (f"nc{os.getpid()}{letter}" for letter in "hab")
    environment = _environment()
    with contextlib.ExitStack() as stack:
        for name in (hub, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _wire(hub, names)
        hosts = [
            Host(
                name=name,
                address=f"10.77.0.{number}",
                home=directory / name[-1],
                environment={
                    **environment,
                    "NANOCHAT_HOME": str(directory / name[-1]),
                    "PET_NODE_RANK": str(number - 2),
                },
            )
            for number, name in enumerate(names, 2)
        ]
        for host in hosts:
            host.home.mkdir()
            stack.callback(host.kill)
        stack.enter_context(_s3(hub, directory))

        def ask(*command: str) -> str:
            return subprocess.run(
                ["ip", "netns", "exec", hub, sys.executable, *command],
                env=environment,
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout

        module = ("-m", "tests.support.reliability.two_hosts")
        ask(*module, "seed", STORE, str(directory / "seed"), str(vocab))
        yield hosts[0], hosts[1], lambda: json.loads(ask(*module, "look", STORE))


def _environment() -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("NANOCHAT_", "AWS_"))}
    return {
        **ours,
        **client_environment(f"http://{HUB}:{PORT}"),
        "NANOCHAT_STORE": STORE,
        "PET_NNODES": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


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


def main() -> None:
    """Inside the hub's namespace."""
    verb, url = sys.argv[1:3]
    if verb == "seed":
        from infra.storage.s3.store import S3Store

        wait_until(_answers, seconds=60)
        S3Store(f"s3://{BUCKET}").request("create_bucket")
        seed(open_store(url), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.stdout.write(json.dumps(look(open_store(url))))


if __name__ == "__main__":
    main()
