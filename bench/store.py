"""How fast artifacts move: `nanochat push` and `pull` beside `aws s3 cp` or rclone.

    python -m bench.store [--gigabytes 2] [--rounds 3] [--aws PATH]... [--rclone PATH]

Ends with 1 when we are slower than 0.9 times the fastest aws (--at-least), in either direction.

Both tools move the same files to and from the same local S3 server, in turn, in the same run: only
the ratios mean anything on a machine that is shared. What is moved is one artifact, published into
a file:// store first. Every tool is a process of its own, its start included.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.publish import publish
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest, Provenance
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from tests.support.infra.storage.s3_server import client_environment, start_s3

BUCKET = "nanochat"
GIGABYTE = 10**9
FILES = 4
Times: TypeAlias = dict[str, dict[str, list[float]]]  # direction -> tool -> seconds


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description="How fast artifacts move, beside other tools.")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--aws", action="append", help="may be given for several")
    parser.add_argument("--rclone", default=shutil.which("rclone"))
    parser.add_argument("--at-least", type=float, default=0.9, help="our speed / the best aws's")
    options = parser.parse_args()
    peers = find_peers(options.aws or [shutil.which("aws")], options.rclone)
    if not peers:
        sys.exit("skipped: neither aws nor rclone is here to compare with (--aws, --rclone)")
    with tempfile.TemporaryDirectory(prefix="bench-store-") as directory:
        times = measure(Path(directory), peers, options.gigabytes, options.rounds)
    report(times, options.gigabytes)
    failures = find_failures(times, at_least=options.at_least)
    for line in failures:
        print(line)
    sys.exit(1 if failures else 0)


def find_peers(aws: Sequence[str | None], rclone: str | None) -> dict[str, str]:
    """Name -> path of the tools that are here: aws, aws-2 and so on, rclone."""
    names = ("aws", *(f"aws-{number}" for number in range(2, len(aws) + 1)))
    found = dict(zip(names, aws, strict=True)) | {"rclone": rclone}
    return {name: path for name, path in found.items() if path}


def find_failures(times: Times, *, at_least: float) -> list[str]:
    """One line for each direction in which we are too slow beside the fastest aws."""
    lines: list[str] = []
    for direction, tools_times in times.items():
        medians = {tool: statistics.median(seconds) for tool, seconds in tools_times.items()}
        peers = {tool: median for tool, median in medians.items() if tool.startswith("aws")}
        if not peers:
            continue
        best = min(peers, key=peers.__getitem__)
        ratio = peers[best] / medians["nanochat"]
        if ratio < at_least:
            lines.append(f"{direction}: {ratio:.2f} times {best}, at least {at_least} is wanted")
    return lines


def measure(directory: Path, peers: dict[str, str], gigabytes: float, rounds: int) -> Times:
    """Seconds of every round."""
    manifest = make_artifact(directory, int(gigabytes * GIGABYTE))
    times: Times = {"push": {}, "pull": {}}
    server = start_s3(directory / "server")
    try:
        server.make_bucket(BUCKET)
        os.environ.update(server.environment)
        for round_number in range(rounds):
            for tool, push, pull in tools(directory, server.endpoint, manifest, peers):
                prefix = f"{tool}-{round_number}"
                times["push"].setdefault(tool, []).append(seconds_of(push, prefix))
                times["pull"].setdefault(tool, []).append(seconds_of(pull, prefix))
                check(directory / f"pulled-{prefix}", manifest)
                clear(directory, prefix)
    finally:
        server.kill()
    return times


def clear(directory: Path, prefix: str) -> None:
    """Forget what a tool moved, so that the disk does not fill."""
    shutil.rmtree(directory / f"pulled-{prefix}")
    shutil.rmtree(directory / "home", ignore_errors=True)
    store = open_store(f"s3://{BUCKET}/{prefix}")
    for entry in list(store.list("")):
        store.delete(entry.key)


def tools(
    directory: Path, server: str, manifest: Manifest, peers: dict[str, str]
) -> Iterator[tuple[str, Callable[[str], None], Callable[[str], None]]]:
    """(name, push, pull) of each tool; both take a prefix of the bucket."""
    environment = {**os.environ, **client_environment(server)}
    environment.pop("AWS_CA_BUNDLE", None)  # old rclones refuse it, and nothing here uses TLS
    nanochat = str(Path(sys.executable).parent / "nanochat")
    store = (directory / "store").as_uri()
    source = directory / "store" / Path(manifest.files[0].key).parent
    home = ["--home", str(directory / "home")]
    name = f"{manifest.stage}/{manifest.fingerprint[:12]}"

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    def url(prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def target(prefix: str) -> str:
        return str(directory / f"pulled-{prefix}")

    yield (
        "nanochat",
        lambda p: run(nanochat, "push", name, "--to", url(p), "--store", store, *home),
        lambda p: run(nanochat, "pull", name, "--to", target(p), "--store", url(p), *home),
    )
    for peer in (name for name in peers if name.startswith("aws")):
        copy = (peers[peer], "s3", "cp", "--recursive", "--quiet")
        yield (
            peer,
            lambda p, copy=copy: run(*copy, str(source), url(p)),
            lambda p, copy=copy: run(*copy, url(p), target(p)),
        )
    if rclone := peers.get("rclone"):
        remote = f":s3:{BUCKET}"
        copying = (rclone, "copy", "--quiet", "--s3-provider=Other", "--s3-env-auth")
        copying += (f"--s3-endpoint={server}", "--s3-force-path-style")
        yield (
            "rclone",
            lambda p: run(*copying, str(source), f"{remote}/{p}"),
            lambda p: run(*copying, f"{remote}/{p}", target(p)),
        )


def make_artifact(directory: Path, size: int) -> Manifest:
    """An artifact of `size` bytes in a few files, in the store at directory/store."""
    output = directory / "output"
    output.mkdir()
    for number in range(FILES):
        with (output / f"part-{number}").open("wb") as file:
            for _ in range(size // FILES // 1_000_000):
                file.write(os.urandom(1_000_000))
    preimage = {"stage": "rows", "format": 1, "config": {}, "inputs": {}, "code": {}}
    identity = Identity(stage="rows", fingerprint=fingerprint_of(preimage), preimage=preimage)
    provenance = Provenance(
        run="bench-1",
        owner="bench",
        epoch=1,
        created="2026-01-01T00:00:00Z",
        git_commit=None,
        metrics={},
        segments=(),
    )
    published = publish(
        LocalStore(directory / "store"),
        identity,
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        check_lease=lambda: None,
    )
    shutil.rmtree(output)
    return published.manifest


def seconds_of(work: Callable[[str], None], prefix: str) -> float:
    """Wall time; the disk is idle before."""
    os.sync()
    started = time.perf_counter()
    work(prefix)
    return time.perf_counter() - started


def check(directory: Path, manifest: Manifest) -> None:
    """Every tool brought back every byte's worth."""
    sizes = {path.name: path.stat().st_size for path in directory.rglob("part-*")}
    assert sizes == {file.path: file.size for file in manifest.files}, sizes


def report(times: Times, gigabytes: float) -> None:
    """A table for people, and a line for programs. The ratio is speed: above 1 we are faster."""
    print(f"{'':<6} {'tool':<9} {'median s':>9} {'MB/s':>8}   ours / theirs")
    for direction, tools_times in times.items():
        ours = statistics.median(tools_times["nanochat"])
        for tool, seconds in tools_times.items():
            median = statistics.median(seconds)
            ratio = "" if tool == "nanochat" else f"{median / ours:.2f}"
            speed = gigabytes * 1000 / median
            print(f"{direction:<6} {tool:<9} {median:>9.2f} {speed:>8.0f}   {ratio}")
    print(json.dumps({"gigabytes": gigabytes, "seconds": times}))


if __name__ == "__main__":
    main()
