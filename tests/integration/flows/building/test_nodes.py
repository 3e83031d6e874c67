"""Nodes that build one stage together: they meet, lose each other and resume."""

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.publish import find_manifest
from flows.building import nodes
from flows.building.build import BuildContext, build
from flows.building.coordinator import NodeLost
from flows.building.messages import Start, Status, read_message
from flows.building.nodes import build_share
from flows.building.retry import TransientStageError, is_retryable
from flows.identity.ref import ArtifactRef
from flows.stages import Stage
from infra.launch.link import LinkLost
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ConfigError, StageError
from tests.support.flows.two_nodes import QUICK, connection, context_of, port_of, say, start
from tests.support.flows.waiting import wait_until

# Two ranks save together, as training does. The first attempt loses rank 1 after two steps.
ENTRY = """
import hashlib
import json
import os
import time

from nanochat_core.runtime.progress import Progress


def write(path, text):
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def save(job, step, rank, ranks):
    directory = job.checkpoints / f"step-{step:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    data = f"{step} of {rank}"
    (directory / f"tensors-{rank:05d}.safetensors").write_text(data)
    record = {"size": len(data), "sha256": hashlib.sha256(data.encode()).hexdigest()}
    own = directory / f"tensors-{rank:05d}.json"
    write(own, json.dumps(record))
    if rank:
        while own.exists():  # until it is in the store, as ranks wait before they save again
            time.sleep(0.02)
        return
    records = [directory / f"tensors-{rank:05d}.json" for rank in range(ranks)]
    while not all(path.exists() for path in records):
        time.sleep(0.02)
    files = {f"{path.stem}.safetensors": json.loads(path.read_text()) for path in records}
    tree = {"format": 2, "step": step, "total": 4, "files": files, "state": {}}
    write(directory / "COMMIT.json", json.dumps(tree))
    for path in records:
        path.unlink()


def run(job):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert int(os.environ["LOCAL_RANK"]) == 0
    found = sorted(path.parent for path in job.checkpoints.glob("step-*/COMMIT.json"))
    start = int(found[-1].name.removeprefix("step-")) if found else 0
    for other in range(ranks if found else 0):
        text = (found[-1] / f"tensors-{other:05d}.safetensors").read_text()
        assert text == f"{start} of {other}", text
    progress = Progress(job.events, active=rank == 0)
    progress.start(4, step=start)
    for step in range(start + 1, 5):
        if step == 3 and rank and not found:
            raise ConnectionError("the machine is gone")
        save(job, step, rank, ranks)
        progress.step(step, loss=1.0)
    if rank == 0:
        (job.output / "value.txt").write_text(f"{ranks} ranks resumed from {start}")
    return {"ranks": ranks}
"""
EASY = """
import os


def run(job):
    if os.environ.get("RANK", "0") == "0":
        (job.output / "value.txt").write_text("made")
    return {}
"""
# Node 1 runs out of memory with 4 rows, node 0 with 2; node 1 has no text.
FAILING = """
import os
import time

from nanochat_core.errors import DataError, OutOfMemory


def run(job):
    rows = job.resources.device_batch_size
    at = (os.environ["RANK"], rows)
    if at in (("1", 4), ("0", 2)):
        raise OutOfMemory(f"out of memory with {rows} rows")
    if at == ("1", 1):
        raise DataError("the text is empty", hint="fill it")
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def stage(toys: Any) -> Stage:
    return toys.stage("train", source=ENTRY, compute="gpu")


@pytest.fixture
def contexts(toys: Any, tmp_path: Path) -> list[BuildContext]:
    """Two machines."""
    return [context_of(toys, tmp_path, name) for name in ("a", "b")]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.torch
def test_a_node_that_is_lost_is_waited_for_and_both_go_on(stage, contexts, pool, tmp_path):
    other = start(pool, stage, contexts[1], 1)
    with pytest.raises(NodeLost, match="ConnectionError: the machine is gone") as lost:
        start(pool, stage, contexts[0], 0).result()
    assert is_retryable(lost.value)  # worth another attempt
    assert not other.done()
    shutil.rmtree(tmp_path / "a" / "work")  # the next node 0 is another machine
    first, second = start(pool, stage, contexts[0], 0).result(), other.result()
    assert first.manifest == second.manifest
    with Cache(tmp_path / "cache", 10**9) as cache:
        files = fetch(contexts[0].store, first.manifest, cache) / "files"
        assert (files / "value.txt").read_text() == "2 ranks resumed from 2"
    assert [s["nodes"] for s in first.manifest.provenance.segments] == [2, 2]
    assert not list(tmp_path.glob("?/work/train/*/"))
    again = build_share(stage, contexts[1], {}, node=1, force=False)
    assert again.cached


@pytest.mark.torch
def test_a_host_without_the_secret_learns_nothing_and_changes_nothing(toys, contexts, pool):
    stage = toys.stage("train", source=EASY, compute="gpu")
    first = start(pool, stage, contexts[0], 0)
    endpoint, secret = port_of(stage, contexts[1], first)
    host, _, port = endpoint.rpartition(":")
    claim = Status(node=1, host="other", state="ended", text="it failed")
    with (
        socket.create_connection((host, int(port)), timeout=30.0),  # stays, silent
        socket.create_connection((host, int(port)), timeout=30.0) as hostile,
    ):
        hostile.sendall(f"{secret[::-1]}\n{json.dumps(asdict(claim))}\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert hostile.recv(100) == b""
        other = start(pool, stage, contexts[1], 1)
        assert first.result().manifest == other.result().manifest


@pytest.mark.torch
def test_nodes_take_the_rows_that_fit_and_report_a_mistake_that_a_person_mends(
    toys, contexts, pool
):
    stage = toys.stage("train", source=FAILING, compute="gpu")
    for at, context in enumerate(contexts):
        resources = replace(context.placement.resources, device_batch_size=4)
        contexts[at] = replace(context, placement=replace(context.placement, resources=resources))
    other = start(pool, stage, contexts[1], 1)
    for rows in (4, 2):
        with pytest.raises(StageError, match=f"out of memory with {rows} rows") as lost:
            start(pool, stage, contexts[0], 0).result()
        assert is_retryable(lost.value)
    with pytest.raises(StageError, match=r"the text is empty \(on node 1") as caught:
        start(pool, stage, contexts[0], 0).result()
    assert not is_retryable(caught.value)
    assert caught.value.hint == "fill it"
    with pytest.raises(StageError, match="the text is empty"):
        other.result()


@pytest.mark.torch
def test_one_run_makes_it_anew_on_both_nodes_once(toys, contexts, pool, tmp_path):
    stage = toys.stage("train", source=EASY, compute="gpu")
    alone = replace(contexts[0], placement=replace(contexts[0].placement, nodes=1))
    before = build_share(stage, alone, {}, node=0, force=False).manifest
    manifests = [(before.provenance.run, before.provenance.owner)]
    for run in ("second", "second"):
        both = [replace(context, run_id=run) for context in contexts]
        other = start(pool, stage, both[1], 1, force=True)
        first = start(pool, stage, both[0], 0, force=True).result()
        assert other.result().manifest == first.manifest
        manifests.append((first.manifest.provenance.run, first.manifest.provenance.owner))
    assert [run for run, _ in manifests] == ["run-a", "second", "second"]
    assert manifests[0] != manifests[1] == manifests[2]  # the third found what the second made


@pytest.mark.torch
def test_a_node_whose_process_is_gone_within_an_attempt_is_lost(stage, contexts, pool):
    first = start(pool, stage, contexts[0], 0)
    with connection(stage, contexts[1], first) as link:
        say(link, "ready")
        assert read_message(Start, link.receive()).endpoint is not None
    with pytest.raises(NodeLost, match="node 1, b, is gone"):
        first.result()


@pytest.mark.torch
def test_a_node_that_says_nothing_is_lost(stage, contexts, pool):
    context = replace(contexts[0], terms=replace(QUICK, ttl=1.0))
    first = start(pool, stage, context, 0)
    with connection(stage, contexts[1], first) as link:
        say(link, "ready")
        with pytest.raises(NodeLost, match="node 1, b, is silent for"):
            first.result()


def test_of_two_machines_with_one_number_one_ends(stage, contexts, pool):
    lines: list[str] = []
    contexts = [
        replace(
            context,
            placement=replace(context.placement, nodes=3),
            watch=lambda _, event: lines.append(str(event.get("text"))),
        )
        for context in contexts
    ]
    first = start(pool, stage, contexts[0], 0)
    with connection(stage, contexts[1], first) as link:
        say(link, "ready")
        wait_until(lambda: "waiting: for node 2 of 3" in lines)
        with pytest.raises(StageError, match="node 1 is on host b too"):
            start(pool, stage, contexts[1], 1).result()
    contexts[0].stop.set()
    with pytest.raises(StageInterrupted):
        first.result()


def test_a_stage_of_the_cpu_is_built_by_one_node(toys, contexts):
    stage = toys.stage("data")
    built = build_share(stage, contexts[0], {}, node=0, force=False)
    assert find_manifest(contexts[0].store, ArtifactRef("data", built.manifest.fingerprint))
    with pytest.raises(ConfigError, match="data is built by one machine, this is node 1"):
        build_share(stage, contexts[1], {}, node=1, force=False)


def test_a_node_that_cannot_take_part_says_so_before_node_0_has_waited_long(
    toys, stage, contexts, pool, monkeypatch
):
    def is_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("flows.artifacts.checkpoints.restore_step", is_full)
    other = start(pool, stage, contexts[1], 1)
    with pytest.raises(StageError, match=r"OSError: the disk is full \(on node 1") as caught:
        start(pool, stage, contexts[0], 0).result()
    assert not is_retryable(caught.value)
    with pytest.raises(OSError, match="the disk is full"):
        other.result()


def test_a_node_that_fetches_is_waited_for_until_it_is_gone(stage, contexts, pool):
    lines: list[str] = []
    context = replace(
        contexts[0],
        terms=replace(QUICK, meet=3.0, report=0.0),
        watch=lambda _, event: lines.append(str(event.get("text"))),
    )
    first = start(pool, stage, context, 0)
    with connection(stage, contexts[1], first) as link:
        say(link, "coming")
        count = lines.count("waiting: for node 1 of 2")
        time.sleep(3.5)  # longer than a node that does not come is waited for
        assert lines.count("waiting: for node 1 of 2") > count + 2
        assert not first.done()
    with pytest.raises(NodeLost, match=r"needs 2 nodes: node 1 did not come within 3 s"):
        first.result()


def test_a_node_0_that_is_not_heard_of_is_named(stage, contexts):
    context = replace(contexts[1], terms=replace(QUICK, ttl=0.2, meet=0.3))
    with pytest.raises(TransientStageError, match="node 1 heard nothing of node 0"):
        build_share(stage, context, {}, node=1, force=False)


def test_nodes_that_wait_are_stopped(stage, contexts, pool):
    waiting = [
        start(pool, stage, context, node) for node, context in ((1, contexts[1]), (0, contexts[0]))
    ]
    for context in contexts:
        context.stop.set()
    for future in waiting:
        with pytest.raises(StageInterrupted):
            future.result()


def test_nodes_that_were_started_for_different_numbers_refuse(stage, contexts, pool):
    first = start(pool, stage, contexts[0], 0)
    placement = replace(contexts[1].placement, nodes=3)
    with pytest.raises(ConfigError, match=r"calls 2 nodes with 1 processes, this one was .* 3"):
        build_share(stage, replace(contexts[1], placement=placement), {}, node=1, force=False)
    with pytest.raises(StageError, match=r"calls 2 nodes .* \(on node 1") as heard:
        first.result()
    assert not is_retryable(heard.value)
    assert heard.value.hint == "give all nodes the same PET_NNODES and --gpus"


def test_two_nodes_in_one_home_are_distinguished(stage, contexts, pool, monkeypatch):
    monkeypatch.setattr(nodes, "_SECONDS_FOR_THE_LOCK", -5.5)
    first = start(pool, stage, contexts[0], 0)
    with connection(stage, contexts[1], first):
        pass
    with pytest.raises(StageError, match=r"node 1 works in .*, as another process does") as caught:
        build_share(stage, contexts[0], {}, node=1, force=False)
    assert "a home of its own" in (caught.value.hint or "")
    contexts[0].stop.set()
    with pytest.raises(StageInterrupted):
        first.result()


def test_a_store_in_the_home_of_one_is_refused(stage, toys):
    context = toys.context()
    context = replace(context, placement=replace(context.placement, nodes=2))
    with pytest.raises(ConfigError, match="needs a store that all of them reach"):
        build(stage, context, {}, force=False)


@pytest.mark.parametrize(
    ("met", "said"), [(0, ["coming", "ended"]), (1, ["coming", "ready", "ended"])]
)
def test_a_node_whose_connection_ends_before_the_start_gives_the_attempt_up(
    contexts, tmp_path, met, said
):
    start = Start(epoch=1, host="a", nodes=2, processes=1, step=0, commit="", device_batch_size=1)
    link = Mock(receive=Mock(side_effect=[*[asdict(start)] * met, LinkLost("is gone")]))
    job: Any = SimpleNamespace(checkpoints=tmp_path / "checkpoints", stage="train")
    attempt = nodes._Attempt(contexts[1], SimpleNamespace(stage="train"), link, 1)
    assert attempt.run(lambda start: (job, None)) == bool(met)
    messages = [call.args[0] for call in link.send.call_args_list]
    assert [message["state"] for message in messages if message] == said
