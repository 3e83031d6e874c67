"""What `nanochat run --submit` asks for is taken by a real server, and the run keeps its id."""

from typing import Any
from uuid import UUID

import pytest

from flows.cli.app import main
from flows.cli.train.run import DEPLOYMENT
from flows.identity.ref import name_in
from infra.prefect.flow_runs import submit

pytestmark = pytest.mark.prefect


def test_a_submitted_run_keeps_the_name_that_was_printed(
    server, deploy, api, tmp_path, monkeypatch, capsys
):
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from flows.orchestration.pipeline import nanochat

    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path))
    monkeypatch.delenv("NANOCHAT_STORE", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", server.api_url)
    words = ["--set", "seed=7", "--use", "pretrain@unknown", "--name", "mine", "--force", "sft"]
    assert main(["run", "tiny", "--submit", *words]) == 0
    run, url = (line.split()[1] for line in capsys.readouterr().out.splitlines()[:2])
    assert name_in(run) == "mine"
    id_ = url.rpartition("/")[2]
    asked = api.get(f"/flow_runs/{id_}")
    assert asked["name"] == run
    expected = {"profile": "tiny", "overrides": ["seed=7"], "use": ["pretrain@unknown"]}
    more = {"run_name": "mine", "force": ["sft"], "pool": "gpu"}
    assert asked["parameters"] == {**expected, **more}
    assert "auto-resume" in asked["tags"]
    # The same request again, as when its answer was lost.
    again = submit(server.api_url, DEPLOYMENT, asked["parameters"], name=run)
    assert again == id_
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(id_))
    state: Any = run_flow(nanochat, flow_run=flow_run, return_type="state")
    assert "there is no pretrain@unknown" in state.message
    assert api.get(f"/flow_runs/{id_}")["name"] == run

    # The name that Prefect generated is replaced by the id of the run.
    generated = {"parameters": asked["parameters"]}
    id_ = api.post(f"/deployments/{asked['deployment_id']}/create_flow_run", generated)["id"]
    with get_client(sync_client=True) as client:
        run_flow(nanochat, flow_run=client.read_flow_run(UUID(id_)), return_type="state")
    assert name_in(api.get(f"/flow_runs/{id_}")["name"]) == "mine"
