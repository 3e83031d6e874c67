"""A Kubernetes API server with the verbs that gangs use, which refuses what a real one would.

Objects are checked field by field: a misspelt or misplaced field, a wrong type, or a name that is
no label of DNS is refused, and so is a request without the service account's token.
"""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jsonschema import Draft202012Validator

from tests.support.serving import QuietHandler, serving

NAMESPACE = "nanochat"
TOKEN = "the-token"
_LABEL = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_QUANTITY = {"anyOf": [_COUNT, {"type": "string", "pattern": r"^\d+(m|Ki|Mi|Gi|Ti)?$"}]}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_ANY: dict[str, Any] = {}


def _object(*needed: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(needed),
        "additionalProperties": False,
    }


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


_SECURITY = _object(
    allowPrivilegeEscalation={"type": "boolean"},
    capabilities=_object(drop=_list(_TEXT), add=_list(_TEXT)),
    fsGroup=_COUNT,
    runAsGroup=_COUNT,
    runAsNonRoot={"type": "boolean"},
    runAsUser=_COUNT,
    seccompProfile=_object("type", type={"enum": ["RuntimeDefault"]}),
)
_REFERENCE = _object("name", name=_TEXT)
_CONTAINER = _object(
    "name",
    "image",
    args=_list(_TEXT),
    env=_list(
        _object(
            "name",
            name=_TEXT,
            value=_TEXT,
            valueFrom=_object("fieldRef", fieldRef=_object("fieldPath", fieldPath=_TEXT)),
        )
    ),
    envFrom=_list(_object(configMapRef=_REFERENCE, secretRef=_REFERENCE)),
    image=_TEXT,
    name=_LABEL,
    resources=_object(
        limits={"type": "object", "additionalProperties": _QUANTITY},
        requests={"type": "object", "additionalProperties": _QUANTITY},
    ),
    securityContext=_SECURITY,
    volumeMounts=_list(_object("name", "mountPath", name=_LABEL, mountPath=_TEXT)),
)
_TERM = _object("topologyKey", topologyKey=_TEXT, labelSelector=_object(matchLabels=_TEXTS))
_POD = _object(
    "containers",
    affinity=_object(
        podAntiAffinity=_object(requiredDuringSchedulingIgnoredDuringExecution=_list(_TERM))
    ),
    automountServiceAccountToken={"type": "boolean"},
    containers=_list(_CONTAINER),
    nodeSelector=_TEXTS,
    restartPolicy={"enum": ["Never", "OnFailure"]},
    securityContext=_SECURITY,
    serviceAccountName=_LABEL,
    terminationGracePeriodSeconds=_COUNT,
    tolerations=_list(_object(key=_TEXT, operator=_TEXT, effect=_TEXT)),
    volumes=_list(
        _object("name", name=_LABEL, emptyDir=_object(medium=_TEXT, sizeLimit=_QUANTITY))
    ),
)
_JOB = _object(
    "template",
    backoffLimit=_COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=_COUNT,
    parallelism=_COUNT,
    podFailurePolicy=_object(
        rules=_list(
            _object(
                "action",
                action={"enum": ["FailJob", "Ignore", "Count"]},
                onPodConditions=_list(_object("type", type=_TEXT, status=_TEXT)),
            )
        )
    ),
    template=_object("spec", spec=_POD),
)
_RULE = _object(
    "action",
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    name=_TEXT,
    onJobFailureReasons=_list(_TEXT),
)
_META = _object("name", name=_LABEL, labels=_TEXTS)
JOBSET = _object(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_META,
    spec=_object(
        "replicatedJobs",
        failurePolicy=_object(
            maxRestarts=_COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules=_list(_RULE),
        ),
        network=_object(
            enableDNSHostnames={"type": "boolean"}, publishNotReadyAddresses={"type": "boolean"}
        ),
        replicatedJobs=_list(
            _object(
                "name",
                "template",
                name=_LABEL,
                replicas=_COUNT,
                template=_object("spec", spec=_JOB),
            )
        ),
        ttlSecondsAfterFinished=_COUNT,
    ),
)
_DELETE = _object(propagationPolicy={"enum": ["Foreground", "Background", "Orphan"]})


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
                _check(query, _DELETE)
                return self.jobsets.pop(name)
            case "GET", _ if path == pods:
                return {"items": [pod for pod in self.pods if _has(pod, query["labelSelector"])]}
            case "GET", place if place.startswith(f"{pods}/") and name == "log":
                return self._log(place.rpartition("/")[2], query)
            case _:
                raise Refusal(404, f"{method} {path} not found")

    def _create(self, body: Any) -> Any:
        _check(body, JOBSET)
        name, spec = body["metadata"]["name"], body["spec"]
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
        # The pod's clock: it stands still after the last line.
        now = max(datetime.fromisoformat(line[:19]) for line in self.logs[pod] if line[:1] == "2")
        since = now - timedelta(seconds=int(query.get("sinceSeconds", 10**6)))
        return "".join(f"{line}\n" for line in self.logs[pod] if line[:19] >= since.isoformat())


def _containers(job: Any) -> list[Any]:
    return job["template"]["spec"]["template"]["spec"]["containers"]


def _has(pod: Any, selector: str) -> bool:
    wanted = dict(term.split("=", 1) for term in selector.split(","))
    return wanted.items() <= pod["metadata"]["labels"].items()


def _check(body: Any, schema: Any) -> None:
    errors = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(body)
    ]
    if errors:
        raise Refusal(422, "; ".join(errors))


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
