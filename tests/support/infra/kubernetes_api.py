"""A Kubernetes API server with the verbs that gangs use, which refuses what a real one would.

A misspelt or misplaced field, a wrong type, or a name of a JobSet that is no label of DNS is
refused, and so is a request without the service account's token.
"""

import contextlib
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from tests.support.infra.deployed import leaves
from tests.support.serving import QuietHandler, serving

NAMESPACE = "nanochat"
TOKEN = "the-token"
_LABEL, _TEXT, _COUNT, _BOOL = r'"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"', '".*"', r"\d+", "true|false"
# Field of a JobSet -> its value as JSON. Pods' templates are checked by the official client.
JOBSET = {
    "apiVersion": '"jobset.x-k8s.io/v1alpha2"',
    "kind": '"JobSet"',
    "metadata.name": _LABEL,
    "spec.failurePolicy.maxRestarts": _COUNT,
    "spec.failurePolicy.restartStrategy": '"(Blocking)?Recreate"',
    "spec.failurePolicy.rules.N.action": '"(FailJobSet|RestartJobSet(AndIgnoreMaxRestarts)?)"',
    "spec.failurePolicy.rules.N.name": _TEXT,
    "spec.failurePolicy.rules.N.onJobFailureReasons.N": _TEXT,
    "spec.network.enableDNSHostnames": _BOOL,
    "spec.network.publishNotReadyAddresses": _BOOL,
    "spec.replicatedJobs.N.name": _LABEL,
    "spec.replicatedJobs.N.replicas": _COUNT,
    "spec.ttlSecondsAfterFinished": _COUNT,
}
REQUIRED = ("apiVersion", "kind", "metadata.name", "spec.replicatedJobs.N.name")


class Refusal(Exception):
    """A status code and a message."""


@dataclass
class Cluster:
    """The objects of the server; a test plays the controllers by changing them."""

    url: str = ""
    kubeconfig: Path = Path()
    jobsets: dict[str, Any] = field(default_factory=dict)
    pods: list[Any] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)  # lines "TIME TEXT", by pod
    deleting: set[str] = field(default_factory=set)  # names that are not free yet
    broken: int = 0  # so many requests get status code 500
    promised: int = 0  # bytes of each answer that the server announces, if not as many as it has
    has_jobsets: bool = True  # False: their controller is not installed
    requests: list[str] = field(default_factory=list)

    def write_kubeconfig(self, token: str = TOKEN) -> None:
        """Write the file that names the server, its namespace and a user's token."""
        context = {"cluster": "test", "user": "test", "namespace": NAMESPACE}
        tree = {
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        self.kubeconfig.write_text(json.dumps(tree))  # JSON is YAML

    def end(self, name: str, condition: str, message: str = "") -> None:
        """End a JobSet as its controller does."""
        ended = {"type": condition, "status": "True", "message": message}
        self.jobsets[name]["status"]["conditions"] = [ended]

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        """Return the answer to a request. Raises Refusal."""
        jobsets = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        name = path.rpartition("/")[2]
        match method, path.removesuffix(f"/{name}"):
            case "POST", _ if path == jobsets and self.has_jobsets:
                return self._create(body)
            case "GET", place if place == jobsets and name in self.jobsets:
                return self.jobsets[name]
            case "DELETE", place if place == jobsets and name in self.jobsets:
                if query != {"propagationPolicy": "Foreground"}:
                    raise Refusal(422, f"not as in the API: {query}")
                return self.jobsets.pop(name)
            case "GET", _ if path == pods:
                return {"items": [pod for pod in self.pods if _has(pod, query["labelSelector"])]}
            case "GET", place if place.startswith(f"{pods}/") and name == "log":
                return self._log(place.rpartition("/")[2], query)
            case _:
                raise Refusal(404, f"{method} {path} not found")

    def _create(self, body: Any) -> Any:
        name, spec = body["metadata"]["name"], body["spec"]
        faults = [*_find_faults_of_jobset(body)]
        for job in spec["replicatedJobs"]:
            faults += _find_faults("V1JobTemplateSpec", job["template"], "template")
        if faults:
            raise Refusal(422, f"not as in the API: {', '.join(faults)}")
        for job in spec["replicatedJobs"]:
            last = job["template"]["spec"]["parallelism"] - 1
            if len(pod := f"{name}-{job['name']}-0-{last}-abcde") > 63:
                raise Refusal(422, f"{pod} is too long for a pod")
            names = [e["name"] for c in _containers(job) for e in c.get("env", [])]
            if len(set(names)) < len(names):
                raise Refusal(422, "a variable is there twice")
        if name in self.jobsets or name in self.deleting:
            raise Refusal(409, f'jobsets "{name}" already exists')
        self.jobsets[name] = {**body, "status": {"restarts": 0, "replicatedJobsStatus": []}}
        return self.jobsets[name]

    def _log(self, pod: str, query: dict[str, str]) -> str:
        assert query["timestamps"].lower() == "true"
        return "".join(f"{line}\n" for line in self.logs[pod][-int(query["tailLines"]) :])


def _find_faults_of_jobset(body: Any) -> Iterator[str]:
    """Yield the fields of a JobSet, less its pods and labels, that are not as in its API."""
    found = {re.sub(r"\.\d+\b", ".N", ".".join(path)): value for path, value in leaves(body)}
    yield from set(REQUIRED) - set(found)
    for path, value in found.items():
        if path.startswith(("metadata.labels.", "spec.replicatedJobs.N.template.")):
            continue
        if not re.fullmatch(JOBSET.get(path, "(?!)"), json.dumps(value)):
            yield path


def _find_faults(kind: str, body: Any, path: str) -> Iterator[str]:
    """Yield the fields that the official client's model `kind` lacks or has with another type."""
    if path.endswith(".resources"):  # quantities: texts or numbers
        return
    if (item := re.fullmatch(r"(?i)list\[(.*)\]", kind)) and isinstance(body, list):
        for number, each in enumerate(body):
            yield from _find_faults(item[1], each, f"{path}[{number}]")
    elif (item := re.fullmatch(r"(?i)dict.str, (.*).", kind)) and isinstance(body, dict):
        for name, each in body.items():
            yield from _find_faults(item[1], each, f"{path}.{name}")
    elif isinstance(body, dict) and (model := getattr(client, kind, None)):
        kinds = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
        for name, each in body.items():
            yield from _find_faults(kinds.get(name, ""), each, f"{path}.{name}")
    elif not isinstance(body, {"str": str, "int": int, "bool": bool}.get(kind, ())):
        yield path


def _containers(job: Any) -> list[Any]:
    return job["template"]["spec"]["template"]["spec"]["containers"]


def _has(pod: Any, selector: str) -> bool:
    wanted = dict(term.split("=", 1) for term in selector.split(","))
    return wanted.items() <= pod["metadata"]["labels"].items()


@contextlib.contextmanager
def kubernetes_api(directory: Path) -> Generator[Cluster]:
    """Serve a cluster on 127.0.0.1, with a kubeconfig in `directory`."""
    cluster = Cluster(kubeconfig=directory / "kubeconfig")

    class Handler(QuietHandler):
        def _answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            cluster.requests.append(f"{self.command} {parts.path}")
            try:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    raise Refusal(401, "Unauthorized")
                if cluster.broken:
                    cluster.broken -= 1
                    raise Refusal(500, "etcd has no leader")
                if data and self.headers["Content-Type"] != "application/json":
                    raise Refusal(415, "not JSON")
                body = json.loads(data) if data else None
                code = 201 if self.command == "POST" else 200
                found = cluster.answer(self.command, parts.path, query, body)
            except Refusal as error:
                code, message = error.args
                found = {"kind": "Status", "code": code, "message": message}
            answer = found if isinstance(found, str) else json.dumps(found)
            kind = "text/plain" if isinstance(found, str) else "application/json"
            length = {"content_length": str(cluster.promised)} if cluster.promised else {}
            self.reply(code, answer.encode(), content_type=kind, **length)

        do_GET = do_POST = do_DELETE = _answer

    with serving(Handler) as port:
        cluster.url = f"http://127.0.0.1:{port}"
        cluster.write_kubeconfig()
        yield cluster
