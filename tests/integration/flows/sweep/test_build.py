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
    """The future of a unit that has ended: with an artifact, or an error if there is none."""

    def __init__(self, made: Any, error: Exception | None = None) -> None:
        from prefect.states import Completed, Failed

        error = error or StageInterrupted("the run is being stopped")
        self.state = Completed(data=SimpleNamespace(manifest=made)) if made else Failed(data=error)
        self._final_state = self.state  # which `as_completed` reads

    def wait(self) -> None:
        """Return at once."""

    def result(self) -> Any:
        """Return what was built."""
        return self.state.data


def runs_begun(toys: Any, monkeypatch: Any, submit: Any, stop: threading.Event, error: Any) -> Any:
    """Build a sweep of five points and three seeds that ends with `error`; return sweep and runs.

    The runs are the labels of the members that were begun.
    """
    from flows.orchestration import flow_setup
    from flows.sweep import build
    from flows.sweep.plan import units_of

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
    with pytest.raises(error):
        build.build_units(sweep, units_of(sweep, make_stages(toys)), context, runs)
    return sweep, {m.label for m in sweep.members if find_run(context.store, runs[m.label].run)}


def made_by(stage: Any, label: str) -> Ended:
    """Return a unit with an artifact."""
    return Ended(make_manifest(stage.name, config={"unit": label}, metrics={"val_bpb": 1.0}))


def test_a_sweep_that_is_cancelled_after_a_point_has_finished_begins_no_other_run(
    toys, monkeypatch
):
    stop = threading.Event()

    def submit(stage: Any, *given: Any, label: str, **options: Any) -> Ended:
        if label == "p2 s1 / pretrain":
            stop.set()  # Cancel, when base and p1 have finished; the others are interrupted
        return Ended(None) if stop.is_set() else made_by(stage, label)

    sweep, begun = runs_begun(toys, monkeypatch, submit, stop, StageInterrupted)
    bases = {f"{sweep.points[0].label} s{seed}" for seed in (1, 2, 3)}
    assert begun == bases | {f"p{point} s1" for point in (1, 2, 3, 4)}


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), StageInterrupted("it alone")])
def test_the_other_points_continue_after_an_error_that_is_raised_at_the_end(
    toys, monkeypatch, error
):
    def submit(stage: Any, *given: Any, label: str, **options: Any) -> Ended:
        return Ended(None, error) if label == "p1 s1 / pretrain" else made_by(stage, label)

    _, begun = runs_begun(toys, monkeypatch, submit, threading.Event(), type(error))
    assert begun >= {"p2 s3", "p3 s2"}
    assert "p1 s2" not in begun
