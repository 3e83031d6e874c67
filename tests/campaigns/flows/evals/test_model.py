"""The real thing: a worker judges a base model by the clock, and hears that its head was shuffled.

Takes some minutes: the clock has no seconds.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.publish import publish
from flows.artifacts.runs import find_run, newest_runs
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest
from infra.prefect.server import Server
from infra.storage.open import open_store
from tests.integration.flows.evals.test_flow import events, label
from tests.support.flows.rows import PROVENANCE
from tests.support.flows.shelf import put_run
from tests.support.flows.waiting import wait_until

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(900)]

SETTINGS = (
    "shards.num_shards=2",
    "tokenizer.max_chars=500000",
    "pretrain.num_steps=40",
    "pretrain.eval_tokens=8192",
    "base_eval.eval_tokens=8192",
)
DEPTH = 1
UNTIL = ("shards", "task_data", "tokenizer", "tokens", "rows", "pretrain", "base_eval")
SECONDS = 240


def train(home: Path) -> Any:
    """A run called main, up to the base model and its scores."""
    from prefect import flow

    from flows.building.build import BuildContext
    from flows.orchestration.pipeline import run_pipeline
    from flows.profiles import make_placement, open_profile
    from flows.stages import stage_named
    from tests.support.flows.house import make_run

    opened = open_profile("tiny", depth=DEPTH, overrides=SETTINGS)
    placement = make_placement(opened.pace, home=home, store=(home / "store").as_uri(), gpus=0)
    home.mkdir()
    context = BuildContext(
        run=opened.run,
        run_id="main-1",
        placement=placement,
        store=open_store(placement.store),
        watch=lambda stage, event: None,
        strict=False,
    )

    @flow(name="train")
    def part() -> Any:
        record = make_run("main-1")
        return run_pipeline([stage_named(name) for name in UNTIL], context, record)

    return part()


def shuffle_head(store: Any, model: Manifest, directory: Path) -> Manifest:
    """The same base model, but the rows of its head are in another order."""
    import torch
    from safetensors.torch import load_file, save_file

    with Cache(directory / "cache", 1 << 40) as cache:
        files = fetch(store, model, cache) / "files"
        output = directory / "output"
        subprocess.run(["cp", "-r", str(files), str(output)], check=True)
    path = output / "model.safetensors"
    path.chmod(0o644)
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    request = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = head[request].contiguous()
    path.unlink()
    save_file(tensors, path)
    preimage = {**model.preimage, "config": {"shuffled": True}, "inputs": {}}
    changes = {"run": "main-2", "owner": "main-2", "created": "2099-01-01T00:00:00Z"}
    provenance = replace(PROVENANCE, **changes, epoch=0, metrics={})
    return publish(
        store,
        Identity(stage="pretrain", fingerprint=fingerprint_of(preimage), preimage=preimage),
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        check_lease=lambda: None,
    ).manifest


def wait_for_night(store: Any, count: int) -> Any:
    """The newest of so many finished evaluations."""

    def nights() -> list[Any]:
        found = [run for run in newest_runs(store, "eval-main") if run.status != "running"]
        return found if len(found) >= count else []

    return wait_until(nights, seconds=SECONDS, every=1.0)[0]


def test_a_shuffled_head_raises_the_alert_of_the_nightly_evaluation(
    server: Server, tmp_path: Path
) -> None:
    from deployments.evals import apply, evaluation, remove

    home = tmp_path / "home"
    trained = train(home)
    store = open_store((home / "store").as_uri())
    made = {name: trained.stages[name].manifest for name in UNTIL}
    put_run(store, "main-1", *made.values(), name="main", depth=DEPTH, overrides=SETTINGS)

    apply(
        evaluation(
            "pretrain@main",
            cron="* * * * *",
            paused=False,
            parameters={"store": store.url, "gpus": 0},
            environment={"NANOCHAT_HOME": str(home)},
        )
    )
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", "cpu"],
            env={**os.environ, "PREFECT_WORKER_QUERY_SECONDS": "2"},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
        )
    try:
        first = wait_for_night(store, 1)
        assert first.stages["base_eval"] == made["base_eval"].fingerprint  # no job: it was there
        assert first.status == "finished"

        shuffled = shuffle_head(store, made["pretrain"], tmp_path)
        others = [made[name] for name in ("task_data", "rows")]
        put_run(
            store,
            "main-2",
            *others,
            shuffled,
            name="main",
            depth=DEPTH,
            overrides=SETTINGS,
            started="2099-01-01T00:00:00Z",
        )
        [alert] = events("nanochat.eval.regressed", "pretrain-main", 1, seconds=SECONDS)
    finally:
        remove("pretrain@main")
        worker.send_signal(signal.SIGINT)
        worker.wait(60)

    payload = alert["payload"]
    assert label(alert, "nanochat.metric") == "val_bpb"
    assert label(alert, "nanochat.fingerprint") == shuffled.fingerprint
    # More bits for each byte.
    assert payload["score"]["value"] > payload["baseline"]["value"] + 0.02
    assert not payload["inside_interval"]
    night = find_run(store, payload["run"])
    assert night is not None
    assert night.stages["pretrain"] == shuffled.fingerprint
