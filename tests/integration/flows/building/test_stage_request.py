"""Orders: plain words for one stage, refused where another would come out."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from flows.artifacts.revocations import revoke
from flows.building.build import build, look_up
from flows.building.nodes import build_share
from flows.building.retry import TransientStageError
from flows.building.stage_request import (
    StageRequest,
    check_same,
    make_request,
    match_digest,
    open_request,
    read_request,
)
from flows.identity.redo import RedoCounter, raise_redo
from flows.profiles import tiny
from flows.stages import SHARDS, TOKENIZER
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.house import make_run

RUN = replace(make_run("toy-1"), depth=2, overrides=("seed=7",), gpus=0, place=("threads=1",))


def order_of(toys: Any) -> tuple[StageRequest, Any, Any]:
    """An order of a toy stage with one input, the stage, and the input's manifest."""
    first = toys.stage("first")
    second = toys.stage("second", first)
    made = build(first, toys.context(), {}, force=False).manifest
    inputs = {"first": made}
    identity = look_up(second, toys.context(), inputs, force=False).identity
    asked = make_request(second, toys.context(), RUN, inputs, identity=identity)
    return asked, second, inputs


def test_an_order_has_the_runs_parameters_as_json(toys):
    asked, _, inputs = order_of(toys)
    assert read_request(json.dumps(asdict(asked))) == asked
    assert asked == StageRequest(
        stage="second",
        fingerprint=asked.fingerprint,
        inputs=(f"first/{inputs['first'].fingerprint}",),
        profile="tiny",
        depth=2,
        overrides=("seed=7",),
        run="toy-1",
        store=toys.context().store.url,
        gpus=0,
        place=("threads=1",),
        strict=True,
    )


def test_where_it_is_built_is_not_part_of_what_is_ordered(toys):
    asked, second, inputs = order_of(toys)
    context = toys.context()
    elsewhere = replace(context, placement=replace(context.placement, nodes=3, pool="gpu"))
    check_same(asked, second, elsewhere, inputs)


def test_a_machine_that_would_build_something_else_refuses(toys):
    asked, _, inputs = order_of(toys)
    changed = toys.stage("second", toys.stage("first"), source="def run(job):\n    return {}\n")
    with pytest.raises(ConfigError, match="was requested, but this machine would build") as caught:
        check_same(asked, changed, toys.context(), inputs)
    assert "same version of the code" in (caught.value.hint or "")


def test_an_order_is_for_its_number_whatever_was_asked_for_meanwhile(toys):
    asked, second, inputs = order_of(toys)
    context = toys.context()
    raise_redo(context.store, asked.ref, RedoCounter(), RedoCounter(number=1, runs=("toy-9",)))
    check_same(asked, second, context, inputs)
    built = build_share(second, context, inputs, node=0, force=False, redo=asked.redo)
    assert built.manifest.ref == asked.ref
    revoke(context.store, built.manifest, why="wrong", who="me", when="2026-11-29T17:00:00Z")
    with pytest.raises(TransientStageError, match="was revoked meanwhile"):
        build_share(second, context, inputs, node=0, force=False, redo=asked.redo)


def test_an_order_without_its_input_is_refused(toys):
    asked, second, _ = order_of(toys)
    with pytest.raises(ConfigError, match="lacks its input first"):
        check_same(asked, second, toys.context(), {})


def test_an_input_that_this_machine_does_not_see_is_reported(toys, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "another"))
    asked, _, _ = order_of(toys)
    asked = replace(
        asked,
        stage=TOKENIZER.name,
        inputs=(f"{SHARDS.name}/{'0' * 64}",),
        store=(tmp_path / "another" / "store").as_uri(),
        overrides=(),
    )
    with pytest.raises(ArtifactError, match="shards/000000000000 is not in") as caught:
        open_request(asked, watch=lambda stage, event: None)
    assert "same store" in (caught.value.hint or "")


ORDER = StageRequest(
    stage="sft", fingerprint="ab" * 32, inputs=(), profile="tiny", run="toy-1", store="file:///s"
)


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ({"store": "s3://elsewhere"}, False),
        ({"stage": "rl"}, False),
        ({"fingerprint": "ab" * 31 + "cd"}, False),
        ({"nodes": 2}, False),
        ({"gpus": 0}, False),
        ({"gpus": 4}, False),
        ({"profile": "d12"}, False),
        ({"strict": True}, False),
        ({"run": "toy-2"}, True),
        ({"depth": 3}, True),  # what tiny is without it
        ({"overrides": ("rl.num_steps=9",)}, True),
        ({"gpus": tiny().pace.max_gpus}, True),
        ({"place": ("save_every_seconds=1", "threads=1", "compile=false")}, True),
    ],
)
def test_an_order_is_shared_if_it_differs_only_in_how_it_is_built(changes, is_shared):
    other = match_digest(replace(ORDER, **changes), pool="gpu")
    assert (other == match_digest(ORDER, pool="gpu")) == is_shared
    assert other != match_digest(ORDER, pool="h100")
