"""`nanochat submit` asks a Prefect server for a run; `status` says what the server knows of it."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flows.artifacts.runs import Status, name_in
from flows.cli.app import main
from flows.leases import run_lock
from flows.overrides import default_name
from infra.storage.base import Store
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal


class Api(BaseHTTPRequestHandler):
    """The paths of Prefect's API that create and show flow runs."""

    created: ClassVar[list[dict[str, Any]]] = []
    states: ClassVar[list[tuple[str, str, str]]] = []  # that a flow run is in, one after the other
    live: ClassVar[list[dict[str, Any]]] = []
    set_states: ClassVar[list[tuple[str, str]]] = []  # path and type of each state that was set
    resumes: ClassVar[bool] = True  # whether the automation for crashed runs is on
    refuses: ClassVar[str | None] = None
    faults: ClassVar[list[tuple[str, int | None]]] = []  # prefixes of paths that fail so, once

    def do_GET(self) -> None:
        if self._fails():
            return
        if self.path.startswith("/api/flow_runs/"):
            kind, name, message = Api.states.pop(0)
            said = {"state_type": kind, "state_name": name, "state": {"message": message}}
            self._answer(200, {"name": Api.created[-1]["name"], **said})
            return
        known = {
            "/api/health": True,
            "/api/admin/version": "3",
            "/api/deployments/name/nanochat/nanochat": {"id": "d-1"},
        }
        self._answer(200 if self.path in known else 404, known.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/flow_runs/filter":
            self._answer(200, Api.live)
        elif self.path == "/api/automations/filter":
            self._answer(200, [{"enabled": Api.resumes}])
        elif self.path in ("/api/task_runs/filter", "/api/artifacts/filter"):
            self._answer(200, [])
        elif self.path.endswith("/set_state"):
            if not self._fails():
                Api.set_states.append((self.path, body["state"]["type"]))
                self._answer(200, {})
        elif Api.refuses is not None:
            self._answer(409, {"detail": Api.refuses})
        else:
            assert self.path == "/api/deployments/d-1/create_flow_run"
            Api.created.append(body)
            if not self._fails():  # else only the answer is lost
                self._answer(201, {"id": "f-1"})

    def _fails(self) -> bool:
        """Break the request if it is the next to fail: with a status, or without an answer."""
        if not Api.faults or not self.path.startswith(Api.faults[0][0]):
            return False
        code = Api.faults.pop(0)[1]
        if code is None:
            self.close_connection = True
            return True
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"<html>\n<title>Proxy</title></html>")
        return True

    def _answer(self, code: int, tree: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(tree).encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def api_url(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("NANOCHAT_PREFECT_AUTH", raising=False)
    for name in ("created", "states", "live", "faults", "set_states"):
        monkeypatch.setattr(Api, name, [])
    monkeypatch.setattr(Api, "resumes", True)
    monkeypatch.setattr(Api, "refuses", None)
    monkeypatch.setattr("infra.prefect.flow_runs._PAUSES", (0.0, 0.0))
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        yield url
        server.shutdown()
        thread.join()


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
    monkeypatch.setattr("flows.cli.train.submit._SECONDS_BETWEEN_LOOKS", 0.0)
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
    monkeypatch.setattr("flows.cli.train.submit._SECONDS_BETWEEN_LOOKS", 0.0)
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
    ("words", "error"),
    [
        (["--store", "ftp://x/y"], "unsupported store URL"),
        (["--gpus", "-1"], "--gpus is -1"),
        (["--name", "a/b"], "'a/b' cannot be the name of a run"),
        (["--name", "d12"], "d12 is the name of another profile"),
    ],
)
@pytest.mark.usefixtures("api_url")
def test_a_mistake_is_found_before_a_run_is_created(
    terminal: Terminal, words: list[str], error: str
) -> None:
    assert error in terminal.fails("submit", "tiny", *words)[0]
    assert Api.created == []


@pytest.mark.usefixtures("api_url")
def test_status_says_that_a_run_waits_for_a_worker(terminal: Terminal, store: Store) -> None:
    put_run(store, "tiny-1", status="running")
    Api.live = [
        {"name": "tiny-1", "state_type": "RUNNING", "state_name": "Running"},
        {
            "name": "pretrain/1a2b3c4d5e6f",
            "state_type": "SCHEDULED",
            "state_name": "Late",
            "work_pool_name": "gpu",
        },
        {"name": "sft/1a2b3c4d5e6f", "state_type": "COMPLETED", "state_name": "Cached"},
    ]
    lines = terminal.said("status", "tiny")
    assert lines[-2:] == ["the run is running", "pretrain waits for a worker in the pool gpu: Late"]
    Api.live = []
    assert "resume with" in terminal.said("status", "tiny")[-1]


@pytest.mark.usefixtures("api_url")
def test_status_says_that_a_submitted_run_waits_for_its_first_worker(terminal: Terminal) -> None:
    run = terminal.said("submit", "tiny")[0].split()[1]
    assert "there is no run" in terminal.fails("status", run)[0]  # the server has none either
    Api.live = [
        {"name": run, "state_type": "SCHEDULED", "state_name": "Late", "work_pool_name": "cpu"}
    ]
    assert terminal.said("status", run) == [
        f"run {run}: not started by a worker",
        "the run waits for a worker in the pool cpu: Late",
    ]
    assert terminal.read("status", run) == []


def crashed(run: str, *, seconds_ago: float, tags: tuple[str, ...] = ("auto-resume",)) -> Any:
    """A flow run whose process was killed, as Prefect shows it."""
    when = datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat()
    return {
        "id": "f-1",
        "name": run,
        "tags": [*tags, f"run:{run}"],
        "state_type": "CRASHED",
        "state_name": "Crashed",
        "state": {"timestamp": when},
    }


@pytest.mark.parametrize("status", ["running", "interrupted"])
@pytest.mark.usefixtures("api_url")
def test_no_second_run_is_offered_while_the_first_is_about_to_be_resumed(
    terminal: Terminal, store: Store, status: Status
) -> None:
    put_run(store, "tiny-1", status=status)
    Api.live = [crashed("tiny-1", seconds_ago=9)]
    lines = terminal.said("status", "tiny")
    assert lines[0] == f"run tiny-1: {status}"
    assert lines[-1] == "the run has crashed; Prefect resumes it within a minute"
    Api.live = [Api.live[0] | {"state_type": "SCHEDULED", "state_name": "AwaitingRetry"}]
    assert terminal.said("status", "tiny")[-1] == "the run waits for a worker: AwaitingRetry"


@pytest.mark.parametrize(
    ("seconds_ago", "tags", "resumes"),
    [(7200, ("auto-resume",), True), (9, (), True), (9, ("auto-resume",), False)],
)
@pytest.mark.usefixtures("api_url")
def test_a_run_that_crashed_and_is_not_resumed_is_recorded_as_ended(
    terminal: Terminal,
    store: Store,
    seconds_ago: float,
    tags: tuple[str, ...],
    resumes: bool,
) -> None:
    put_run(store, "tiny-1", status="running", ended=None)
    Api.live, Api.resumes = [crashed("tiny-1", seconds_ago=seconds_ago, tags=tags)], resumes
    assert terminal.said("status")[0].split()[:2] == ["tiny-1", "interrupted"]
    lines = terminal.said("status", "tiny")
    assert lines[0] == "run tiny-1: interrupted"
    assert lines[-1].endswith("resume with: nanochat run tiny")
    assert Api.set_states == []  # it is Crashed already


@pytest.mark.usefixtures("api_url")
def test_a_killed_command_is_shown_as_crashed_by_prefect_and_its_requests_are_left_alone(
    terminal: Terminal, store: Store, tmp_path: Path
) -> None:
    home, running = tmp_path / "home", {"state_type": "RUNNING", "state_name": "Running"}
    put_run(store, "tiny-1", status="running", ended=None)
    with pytest.raises(KeyboardInterrupt), run_lock.hold(home, "tiny-1", store=store.url):
        raise KeyboardInterrupt
    Api.live = [
        {"id": "f-1", "name": "tiny-1", "tags": ["run:tiny-1"], **running},
        {"id": "f-2", "name": "sft/1a2b", "tags": ["run:tiny-1", "request:7"], **running},
    ]
    Api.faults = [("/api/flow_runs/f-1", 503)]  # it cannot answer at once
    terminal.said("status")
    assert list((home / "runs").iterdir()) != []
    Api.faults = []
    assert terminal.said("status", "tiny")[-1] == "sft is running"
    assert Api.set_states == [("/api/flow_runs/f-1/set_state", "CRASHED")]
    assert list((home / "runs").iterdir()) == []
