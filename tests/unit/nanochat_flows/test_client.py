"""The store from Python: runs, scores, curves and files by the names that commands take."""

from pathlib import Path

import pytest

from flows.identity.manifest import Manifest
from nanochat_core.errors import ArtifactError, ConfigError
from nanochat_flows.client import Client, open_client
from tests.support.flows.house import make_house
from tests.support.flows.measured import put_measured_runs
from tests.support.flows.shelf import put_run


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return open_client(store=(tmp_path / "store").as_uri(), home=tmp_path / "home")


@pytest.fixture
def model(client: Client) -> Manifest:
    """The model of two runs, of which the later one failed."""
    return put_measured_runs(client.store)[0]


def test_runs_are_found_by_their_names(client: Client, model: Manifest) -> None:
    assert [run.run for run in client.runs()] == ["tiny-2", "tiny-1"]
    assert client.run("tiny-1").status == "finished"
    assert client.artifact("pretrain@tiny-1") == model
    with pytest.raises(ConfigError, match="there is no run 'tinny'"):
        client.run("tinny")


def test_scores_have_intervals(client: Client, model: Manifest) -> None:
    core = {"stage": "base_eval", "metric": "core", "value": 0.2, "low": 0.1, "high": 0.3}
    loss = {"stage": "pretrain", "metric": "val_bpb", "value": 1.25, "low": None, "high": None}
    assert client.scores("tiny-1").to_pylist() == [core, loss]
    assert client.scores("base_eval@tiny-1").to_pylist() == [core]


def test_a_curve_has_the_metrics_of_its_own_stage(client: Client, model: Manifest) -> None:
    curve = client.curve("pretrain@tiny-1")
    assert (curve["step"].to_pylist(), curve["loss"].to_pylist()[0]) == ([1, 2], 3.5)
    assert "reward" not in curve.column_names


def test_files_are_fetched_whole_or_one_by_one(tmp_path: Path) -> None:
    house = make_house(tmp_path / "house")
    model = house.build(until="pretrain")["pretrain"]
    client = open_client(store=house.store.url, home=tmp_path / "home")
    name = f"pretrain/{model.fingerprint}"
    for place in (
        client.fetch(name, tmp_path / "all"),
        client.fetch(name, tmp_path / "one", "data"),
    ):
        assert (place / "data").read_text() == model.fingerprint
    with pytest.raises(ArtifactError, match="there is no 'nothing'"):
        client.fetch(name, tmp_path / "none", "nothing")


def test_a_damaged_record_is_passed_over_with_a_warning(
    client: Client, model: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_run(client.store, "tiny-3", model)
    (tmp_path / "store" / "runs" / "tiny-3.json").write_text("{")
    assert client.sql("select run from runs").num_rows == 2
    assert [run.run for run in client.runs()] == ["tiny-2", "tiny-1"]
    assert caplog.text.count("skipped: ") == 2
