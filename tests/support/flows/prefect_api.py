"""A small Prefect server: the paths of its API that create, show and end flow runs."""

import json
from typing import Any, ClassVar

from tests.support.serving import QuietHandler


class Api(QuietHandler):
    """The paths of Prefect's API that create and show flow runs."""

    created: ClassVar[list[dict[str, Any]]] = []
    live: ClassVar[list[dict[str, Any]]] = []
    # What the server answers before `live`, once each: flow runs, a status or nothing.
    lives: ClassVar[list[list[dict[str, Any]] | int | None]] = []
    set_states: ClassVar[list[tuple[str, str]]] = []  # path and type of each state that was set
    refuses: ClassVar[str | None] = None
    faults: ClassVar[list[tuple[str, int | None]]] = []  # prefixes of paths that fail so, once

    def do_GET(self) -> None:
        if self._fails():
            return
        known = {
            "/api/health": True,
            "/api/admin/version": "3",
            "/api/deployments/name/nanochat/nanochat": {"id": "d-1"},
            "/api/deployments/name/one-stage/gpu": {"id": "d-2"},
        }
        self._answer(200 if self.path in known else 404, known.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/flow_runs/filter":
            found = Api.lives.pop(0) if Api.lives else Api.live
            if isinstance(found, list):
                self._answer(200, found)
            else:
                self._break(found)
        elif self.path in ("/api/task_runs/filter", "/api/artifacts/filter"):
            self._answer(200, [])
        elif self.path.endswith("/set_state"):
            if not self._fails():
                Api.set_states.append((self.path, body["state"]["type"]))
                self._answer(200, {"status": "ACCEPT"})
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
        self._break(Api.faults.pop(0)[1])
        return True

    def _break(self, code: int | None) -> None:
        """Answer as a proxy with this status, or end the connection without an answer."""
        if code is None:
            self.close_connection = True
        else:
            self.reply(code, b"<html>\n<title>Proxy</title></html>")

    def _answer(self, code: int, tree: Any) -> None:
        self.reply(code, json.dumps(tree).encode())
