"""Which runs a sweep begins, without Prefect's server."""

import contextlib
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flows.artifacts.runs import find_run
from infra.launch.torchrun import StageInterrupted
from tests.support.flows.house import make_run
from tests.support.flows.shelf import make_manifest
from tests.support.flows.toy_sweep import make_stages, toy_sweep


class Ended:
    """The future of a unit that has ended: with an artifact, or interrupted."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.state = SimpleNamespace(
            is_completed=lambda: made is not None,
            is_failed=lambda: made is None,
            is_crashed=lambda: False,
            is_cancelled=lambda: False,
            result=self._interrupted,
        )

    def add_done_callback(self, note: Any) -> None:
        """Call it at once."""
        note(self)

    def wait(self) -> None:
        """Return at once."""

    def _interrupted(self) -> None:
        raise StageInterrupted("the run is being stopped")

    def result(self) -> Any:
        """Return what was built."""
        return SimpleNamespace(manifest=self._made)


def test_a_sweep_that_is_cancelled_after_a_point_has_finished_begins_no_other_run(
    toys, monkeypatch
):
    from flows.orchestration import flow_setup
    from flows.sweep import build
    from flows.sweep.plan import units_of

    stop = threading.Event()

    def submit(stage: Any, *given: Any, label: str, **options: Any) -> Ended:
        if label == "p2 s1 / pretrain":
            stop.set()  # Cancel, when base and p1 have finished; the others are interrupted
        if stop.is_set():
            return Ended(None)
        return Ended(make_manifest(stage.name, config={"unit": label}, metrics={"val_bpb": 1.0}))

    pages = SimpleNamespace(tag_flow_run=lambda *runs: None, close=lambda: None)
    monkeypatch.setattr(build, "BackgroundWriter", lambda name: pages)
    monkeypatch.setattr(build, "submit", submit)
    monkeypatch.setattr(build, "stop_stages", lambda *given: True)
    monkeypatch.setattr(build, "keeping_signals", lambda stop: contextlib.nullcontext())
    monkeypatch.setattr(flow_setup, "get_run_logger", lambda: logging.getLogger(__name__))
    sweep = toy_sweep("optimizer.muon_lr=0.01,0.028,0.05,0.5")
    runs = {
        m.label: replace(make_run(f"{m.request.run_name}-1"), name=m.request.run_name)
        for m in sweep.members
    }
    context = replace(toys.context(), stop=stop)
    with pytest.raises(StageInterrupted):
        build.build_units(sweep, units_of(sweep, make_stages(toys)), context, runs)

    begun = {m.label for m in sweep.members if find_run(context.store, runs[m.label].run)}
    bases = {f"{sweep.points[0].label} s{seed}" for seed in (1, 2, 3)}
    assert begun == bases | {f"p{point} s1" for point in (1, 2, 3, 4)}
