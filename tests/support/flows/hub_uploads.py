"""A server that takes uploads as the Hugging Face Hub does, for models.

create          POST /api/repos/create
preupload       POST /api/models/{repo}/preupload/{revision}: which files are large
large files     POST /{repo}.git/info/lfs/objects/batch, then PUT to where that says
commit          POST /api/models/{repo}/commit/{revision}: lines of JSON
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = "Bearer hf_good"


class UploadHub:
    """The server; use it as a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.num_commits = 0
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "UploadHub":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, repository: str) -> dict[str, bytes]:
        """What `main` holds."""
        return self.repositories[repository]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: UploadHub

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != GOOD:
            self._answer(401, {"error": "Invalid credentials"})
            return
        for pattern, answer in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate),
            (r"/api/models/(.+)/preupload/main", self._preupload),
            (r"/(.+)\.git/info/lfs/objects/batch", self._batch),
            (r"/api/models/(.+)/commit/main", self._commit),
        ):
            if match := re.fullmatch(pattern, self.path.partition("?")[0]):
                self._answer(200, answer(body, *match.groups()))
                return
        self._answer(404, {"error": self.path})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == name
        self.server_hub.objects[name] = body
        self._answer(200, {})

    def do_GET(self) -> None:
        if match := re.match(r"/api/models/([^/]+/[^/?]+)", self.path):
            known = match[1] in self.server_hub.repositories
            self._answer(200 if known else 404, {"id": match[1], "sha": "0" * 40, "siblings": []})
        else:
            self._answer(404, {})

    def _create(self, body: bytes) -> Any:
        tree = json.loads(body)
        name = "/".join(filter(None, (tree.get("organization"), tree["name"])))
        self.server_hub.repositories.setdefault(name, {})
        self.server_hub.private[name] = bool(tree.get("private")) or (
            tree.get("visibility") == "private"
        )
        return {"url": f"{self.server_hub.endpoint}/{name}"}

    def _validate(self, body: bytes) -> Any:
        assert "---" in json.loads(body)["content"]
        return {"errors": [], "warnings": []}

    def _preupload(self, body: bytes, repository: str) -> Any:
        assert repository in self.server_hub.repositories
        files = json.loads(body)["files"]
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in files
            ]
        }

    def _batch(self, body: bytes, repository: str) -> Any:
        href = f"{self.server_hub.endpoint}/objects"
        return {
            "transfer": "basic",
            "objects": [
                {
                    "oid": item["oid"],
                    "size": item["size"],
                    "actions": {"upload": {"href": f"{href}/{item['oid']}"}},
                }
                for item in json.loads(body)["objects"]
            ],
        }

    def _commit(self, body: bytes, repository: str) -> Any:
        hub = self.server_hub
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                assert value["encoding"] == "base64"
                content = base64.b64decode(value["content"])
                hub.repositories[repository][value["path"]] = content
            elif item["key"] == "lfsFile":
                hub.repositories[repository][value["path"]] = hub.objects[value["oid"]]
        hub.num_commits += 1
        oid = f"{hub.num_commits:040x}"
        return {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{hub.endpoint}/{repository}/commit/{oid}",
            "hookOutput": "",
        }

    def _answer(self, status: int, tree: Any) -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
