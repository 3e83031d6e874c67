"""`nanochat run --submit` asks a Prefect server for a run, and `status --follow` waits for it."""

import contextlib

import pytest

from flows.cli.app import main
from flows.identity.ref import name_in
from flows.overrides import default_name
from flows.run_request import RunRequest
from infra.storage.base import StoreUnavailable
from tests.support.flows.fixtures import nothing
from tests.support.flows.outage import Outage
from tests.support.flows.prefect_api import Api
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal

pytestmark = pytest.mark.usefixtures("api_url")


def test_a_run_is_submitted_with_what_was_given_and_found_by_its_id(terminal, api_url):
    words = ("--depth", "4", "--set", "seed=7", "--from-stage", "sft", "--compile")
    lines = terminal.said("run", "--submit", "tiny", *words, "--nodes", "2", "--pool", "gpu")
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
    assert name_in(created["name"]) == default_name(RunRequest(depth=4, overrides=("seed=7",)))
    assert lines == [
        f"run      {created['name']}",
        f"Prefect  {api_url.removesuffix('/api')}/v2/runs/flow-run/f-1",
        f"status   nanochat status {created['name']}",
    ]


def test_a_file_is_submitted_as_the_settings_in_it(terminal, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('profile = "tiny"\nname = "mine"\nseed = 7\n', encoding="utf-8")
    terminal.said("run", "--submit", str(path))
    (created,) = Api.created
    assert created["parameters"] == {"profile": "tiny", "overrides": ["seed=7"], "run_name": "mine"}
    assert name_in(created["name"]) == "mine"


def test_a_request_that_is_refused_is_one_line(terminal, api_url, monkeypatch, transcript):
    transcript.replace(api_url, "API")
    terminal.refuses("run --submit tiny --set sede=7")
    Api.refuses = "Validation failed for field 'depth'.\nFailure reason: too deep"
    terminal.refuses("run --submit tiny")
    monkeypatch.setattr("flows.cli.train.run.DEPLOYMENT", "nanochat/other")
    terminal.refuses("run --submit tiny")
    monkeypatch.delenv("PREFECT_API_URL")
    terminal.refuses("run --submit tiny")
    assert Api.created == []


@pytest.fixture
def submitted(terminal: Terminal, api_url: str) -> str:
    """A submitted run that waits for a worker."""
    run = terminal.said("run", "tiny", "--submit")[0].split()[1]
    show(run, "SCHEDULED")
    return run


WAITING = "the run: waiting for a free worker"


def show(run: str, kind: str, message: str = "") -> None:
    """Have the server show the run in this state."""
    Api.live = [{"name": run, "state_type": kind, "state_name": "", "state": {"message": message}}]


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        ("finished", "", []),
        ("failed", "sft broke\nhint: mend it", ["error: sft broke", "hint: mend it"]),
        ("interrupted", "", ["error: run {} ended as interrupted"]),
    ],
)
def test_a_submitted_run_is_followed_from_before_its_start_to_its_end(
    submitted, store, polls, capsys, status, message, said
):
    def begin() -> None:
        put_run(store, submitted, status="running", ended=None)

    def end() -> None:
        put_run(store, submitted, status=status)
        show(submitted, "COMPLETED" if status == "finished" else "FAILED", message)

    polls(nothing, begin, nothing, end)
    assert main(["status", submitted, "--follow"]) == (status != "finished")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == WAITING
    assert lines[1] == f"{submitted} has logged nothing that this machine can read"
    assert lines[2:] == [line.format(submitted) for line in said]


def test_following_continues_while_the_server_does_not_answer_and_ends_with_its_reason(
    submitted, capsys, polls, monkeypatch
):
    monkeypatch.setattr("infra.prefect.flow_runs.ANSWER_SECONDS", 0.0)
    show(submitted, "FAILED", "there is no sft@x\nhint: name another")
    waiting = Api.live[0] | {"state_type": "SCHEDULED"}
    pending = waiting | {"state_type": "PENDING", "state_name": "Pending"}
    Api.lives = [[waiting], [waiting], 200, 503, None, [waiting], [waiting], [pending]]
    polls(*[nothing] * 7)
    assert main(["status", submitted, "--follow"]) == 1
    said = capsys.readouterr().err.splitlines()
    away = "Prefect's server does not answer; following continues"
    changes = [WAITING, away, WAITING, "the run is pending"]
    assert said == [*changes, "error: there is no sft@x", "hint: name another"]
    assert Api.lives == []


def test_a_run_that_finished_in_another_store_is_followed_to_its_good_end(submitted, capsys, polls):
    polls(nothing)
    Api.lives = [Api.live, Api.live]
    show(submitted, "COMPLETED", "All states completed.")
    note = f"{submitted} finished in the worker's store: give --store"
    # Also if it had ended before, and without following.
    for words, said in ((["-f"], [WAITING, note]), (["-f"], [note]), ([], [note])):
        assert main(["status", submitted, *words]) == 0
        assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("begun", [False, True])
def test_following_continues_while_the_store_is_away(
    submitted, store, monkeypatch, polls, capsys, begun
):
    left = Outage(store, "put", "away")
    monkeypatch.setattr("flows.cli.options.open_store", lambda url: left)
    if begun:
        put_run(store, submitted, status="running")

    def leave_and_end() -> None:
        with contextlib.suppress(StoreUnavailable):
            left.put("away", b"")
        put_run(store, submitted)

    polls(nothing, leave_and_end)
    assert main(["status", submitted, "--follow"]) == 0
    note = "no answer to get_stored; the run is not affected, and following continues"
    assert capsys.readouterr().err.splitlines().count(note) == 1


CREATE = "/api/deployments/d-1/create_flow_run"


@pytest.mark.parametrize("fault", [None, 200, 503, 429])
def test_a_request_whose_answer_is_lost_is_repeated_and_creates_one_run(terminal, fault):
    Api.faults = [(CREATE, fault), (CREATE, fault)]
    lines = terminal.said("run", "--submit", "tiny")
    assert len(Api.created) == 3
    keys = {created["idempotency_key"] for created in Api.created}
    assert keys == {created["name"] for created in Api.created} == {lines[0].split()[1]}


NAMED = "/api/deployments/name/"


def test_a_refusal_has_the_hint_for_its_cause(terminal, api_url, transcript, monkeypatch):
    transcript.replace(api_url, "API")
    monkeypatch.setattr("flows.cli.train.run.new_run_id", lambda name, when: f"{name}-1")
    created = [(CREATE, fault) for fault in (401, 400, 422, None, 200, 503)]
    for fault in (*created, (NAMED, 401), (NAMED, 200), (NAMED, 502)):
        Api.faults = [fault] * 3  # of each try
        terminal.refuses("run --submit tiny")


def test_a_mistake_is_found_before_a_run_is_created(terminal):
    for words in ("--store ftp://x/y", "--name a/b", "--name d12"):
        terminal.refuses(f"run --submit tiny {words}")
    terminal.refuses("run --submit tiny --gpus -1", code=2)
    assert Api.created == []
