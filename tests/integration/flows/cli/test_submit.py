"""`nanochat submit` asks a Prefect server for a run, and watches it."""

from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import main
from flows.identity.ref import name_in
from flows.overrides import default_name
from infra.storage.base import Store
from tests.support.flows.prefect_api import Api
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal


def test_a_run_is_submitted_with_what_was_given_and_found_by_its_id(
    terminal: Terminal, api_url: str
) -> None:
    words = ("--depth", "4", "--set", "seed=7", "--from-stage", "sft", "--compile")
    lines = terminal.said("submit", "tiny", *words, "--nodes", "2", "--pool", "gpu")
    (created,) = Api.created
    assert created["parameters"] == {
        "profile": "tiny",
        "depth": 4,
        "overrides": ["seed=7"],
        "from_stage": "sft",
        "place": ["compile=true"],
        "pool": "gpu",
        "nodes": 2,
    }
    assert name_in(created["name"]) == default_name("tiny", depth=4, overrides=("seed=7",))
    assert lines == [
        f"run      {created['name']}",
        f"Prefect  {api_url.removesuffix('/api')}/v2/runs/flow-run/f-1",
        f"status   nanochat status {created['name']}",
    ]


@pytest.mark.usefixtures("api_url")
def test_a_file_is_submitted_as_the_settings_in_it(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('profile = "tiny"\nname = "mine"\nseed = 7\n', encoding="utf-8")
    terminal.said("submit", str(path))
    (created,) = Api.created
    assert created["parameters"] == {"profile": "tiny", "overrides": ["seed=7"], "run_name": "mine"}
    assert name_in(created["name"]) == "mine"


def test_what_is_refused_is_one_line(
    terminal: Terminal, api_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no setting" in terminal.fails("submit", "tiny", "--set", "sede=7")[0]
    Api.refuses = "Validation failed for field 'depth'.\nFailure reason: too deep"
    assert terminal.fails("submit", "tiny")[0] == (
        "the Prefect server refuses the request: Validation failed for field 'depth'. Failure "
        "reason: too deep"
    )
    monkeypatch.setattr("flows.cli.train.submit.DEPLOYMENT", "nanochat/other")
    assert terminal.fails("submit", "tiny") == (
        f"{api_url} has no deployment nanochat/other",
        "register it with: nanochat deploy",
    )
    monkeypatch.delenv("PREFECT_API_URL")
    error, hint = terminal.fails("submit", "tiny")
    assert error == "no Prefect server is running, and so no worker"
    assert hint == "start both with: nanochat up"
    assert Api.created == []


@pytest.mark.usefixtures("api_url")
def test_a_run_can_be_watched_to_its_end(
    terminal: Terminal, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("flows.cli.train.submit.ASK_SECONDS", 0.0)
    monkeypatch.setattr("flows.cli.train.submit.new_run_id", lambda name, when: f"{name}-1")
    put_run(store, "tiny-1", put_artifact(store, make_manifest("shards")), status="running")
    Api.states = [("SCHEDULED", "Late", ""), ("RUNNING", "Running", ""), ("COMPLETED", "Done", "")]
    assert [line.split()[0] for line in terminal.said("submit", "tiny", "--watch")[3:]] == [
        "late",
        "done",
        "running",
        "done",
    ]
    Api.states = [("FAILED", "Failed", "sft broke\nhint: mend it")]
    assert main(["submit", "tiny", "--watch"]) == 1
    assert capsys.readouterr().err.splitlines() == ["error: sft broke", "hint: mend it"]


CREATE = "/api/deployments/d-1/create_flow_run"
READ = "/api/flow_runs/"


@pytest.mark.parametrize("fault", [None, 200, 503, 429])
@pytest.mark.usefixtures("api_url")
def test_a_request_whose_answer_is_lost_is_repeated_and_creates_one_run(
    terminal: Terminal, fault: int | None
) -> None:
    Api.faults = [(CREATE, fault), (CREATE, fault)]
    lines = terminal.said("submit", "tiny")
    assert len(Api.created) == 3
    keys = {created["idempotency_key"] for created in Api.created}
    assert keys == {created["name"] for created in Api.created} == {lines[0].split()[1]}


@pytest.mark.parametrize("fault", [None, 200, 503])
@pytest.mark.usefixtures("api_url")
def test_a_run_that_may_have_been_created_is_named_with_how_to_look(
    terminal: Terminal, fault: int | None
) -> None:
    Api.faults = [(CREATE, fault)] * 3
    _, hint = terminal.fails("submit", "tiny")
    run = Api.created[0]["name"]
    assert hint == (
        f"run {run} may have been created; before you submit again, look with: "
        f"nanochat status {run}"
    )


@pytest.mark.parametrize(
    ("path", "code", "hint"),
    [
        (CREATE, 401, "set NANOCHAT_PREFECT_AUTH to"),
        (CREATE, 400, "nothing was submitted; the log of the server"),
        (CREATE, 422, "if the code is newer than the deployment, run: nanochat deploy"),
        ("/api/deployments/name/", 401, "set NANOCHAT_PREFECT_AUTH to"),
        ("/api/deployments/name/", 200, "nothing was submitted: run the same command again"),
        ("/api/deployments/name/", 502, "nothing was submitted: run the same command again"),
    ],
)
@pytest.mark.usefixtures("api_url")
def test_a_refusal_has_the_hint_for_its_cause(
    terminal: Terminal, path: str, code: int, hint: str
) -> None:
    Api.faults = [(path, code)]
    assert terminal.fails("submit", "tiny")[1].startswith(hint)


@pytest.mark.usefixtures("api_url")
def test_watching_continues_while_the_server_does_not_answer(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("flows.cli.train.submit.ASK_SECONDS", 0.0)
    monkeypatch.setattr("flows.cli.train.submit.new_run_id", lambda name, when: f"{name}-1")
    Api.states = [("COMPLETED", "Done", "")]
    Api.faults = [(READ, None), (READ, 503), (READ, 200)]
    assert main(["submit", "tiny", "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].split() == ["done", "tiny-1"]
    assert printed.err.count("\n") == 1
    assert "watching continues" in printed.err
    Api.faults = [(READ, 404)]
    assert main(["submit", "tiny", "--watch"]) == 1
    assert "hint: look with: nanochat status tiny-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--store", "ftp://x/y"], 1, "unsupported store URL"),
        (["--gpus", "-1"], 2, "--gpus is -1"),
        (["--name", "a/b"], 1, "'a/b' cannot be the name of a run"),
        (["--name", "d12"], 1, "d12 is the name of another profile"),
    ],
)
@pytest.mark.usefixtures("api_url")
def test_a_mistake_is_found_before_a_run_is_created(
    terminal: Terminal, words: list[str], code: int, error: str
) -> None:
    assert error in terminal.fails("submit", "tiny", *words, code=code)[0]
    assert Api.created == []
