"""Gangs of Kubernetes: a JobSet each, from a pod whose service account may create them.

The JobSet's template is infra/kubernetes/jobset/jobset.yaml, or a changed copy of it. With the name
of a local queue Kueue admits the pods of a JobSet together.
"""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from infra.gangs.base import GangError, GangSpec, GangState, Phase, SchedulerUnavailable

TEMPLATE = Path(__file__).parents[1] / "kubernetes" / "jobset" / "jobset.yaml"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # as pods see it
QUEUE = "kueue.x-k8s.io/queue-name"
_SECONDS = 30.0
_MOST_LOG = 2**20  # bytes of a log in one call
_PHASES: dict[str, Phase] = {"Completed": "finished", "Failed": "failed", "Deleted": "cancelled"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")  # RFC 3339
_RETRYABLE_CODES = (408, 429)  # status codes 4xx that a later request may not get


class Kubernetes:
    """A namespace of a cluster, through its API server."""

    def __init__(
        self, url: str, *, template: Path, queue: str | None, account: Path = ACCOUNT
    ) -> None:
        """Use the API server at `url` with token, CA and namespace of a service account."""
        namespace = (account / "namespace").read_text().strip()
        self._server = url.rstrip("/")
        self._jobsets = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._template = template
        self._queue = queue
        self._token = account / "token"
        ca = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=ca) if url.startswith("https:") else None

    def find(self, name: str) -> str | None:
        """Return the JobSet's name if it exists and has not ended, else None."""
        found = self._get(name)
        return None if found is None or _ended(found) else name

    def submit(self, spec: GangSpec) -> str:
        """Create the JobSet, in place of one of this name that has ended, and return its name."""
        template: Any = yaml.safe_load(self._template.read_text(encoding="utf-8"))
        if (found := self._get(spec.name)) is not None:
            if _ended(found) is None:
                return spec.name
            self.cancel(spec.name)
        try:
            self._call("POST", self._jobsets, make_jobset(template, spec, queue=self._queue))
        except _Conflict:
            raise SchedulerUnavailable(f"JobSet {spec.name} is being deleted") from None
        return spec.name

    def describe(self, gang: str) -> str:
        """Return the JobSet's name, and the command that shows it."""
        return f"JobSet {gang}: kubectl describe jobset {gang}"

    def state(self, gang: str) -> GangState:
        """Return the JobSet's state."""
        found = self._get(gang)
        if found is None:
            return GangState(phase="cancelled", text="its JobSet was deleted")
        if (end := _ended(found)) is not None:
            phase = _PHASES[end["type"]]
            # Of pod 0: the others end with another code when it fails, or wait for it.
            code = _exit_code(self._find_pod_0(gang)) if phase == "failed" else None
            return GangState(phase=phase, text=end.get("message") or end["type"], exit_code=code)
        jobs = found.get("status", {}).get("replicatedJobsStatus", [])
        is_running = any(job.get("ready") or job.get("active") for job in jobs)
        restarts = found.get("status", {}).get("restarts", 0)
        text = f"{'active' if is_running else 'waiting'}, {restarts} restarts"
        return GangState(phase="running" if is_running else "queued", text=text)

    def cancel(self, gang: str) -> None:
        """Delete the JobSet: its pods get SIGTERM, and SIGKILL after their grace period."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        self._call("DELETE", f"{self._jobsets}/{quote(gang)}", options)

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        """Return the new lines of pod 0; `after` is the time of the last one."""
        pod = self._find_pod_0(gang)
        if pod is None:
            return [], after
        query = {"timestamps": "true", "limitBytes": str(_MOST_LOG)}
        if after:  # the server knows whole seconds only
            query["sinceTime"] = re.sub(r"\.\d+", "", after)
        path = f"{self._pods}/{quote(pod['metadata']['name'])}/log?{urlencode(query)}"
        answer = self._call("GET", path) or ""
        # What follows the last newline is a line that limitBytes has cut, perhaps in its time.
        lines = [line.partition(" ") for line in answer.split("\n")[:-1]]
        new = [(time, text) for time, _, text in lines if _TIME.fullmatch(time) and time > after]
        if not new and after and len(answer.encode()) > _MOST_LOG // 2:
            note = f"the rest of the lines of {after[:19]} is left out: too many in one second"
            return [note], _next_second(after)
        return [text for _, text in new], new[-1][0] if new else after

    def _find_pod_0(self, gang: str) -> Any:
        """Return the newest pod 0 of a gang that has started, or None."""
        labels = f"jobset.sigs.k8s.io/jobset-name={gang},batch.kubernetes.io/job-completion-index=0"
        found = self._read(f"{self._pods}?{urlencode({'labelSelector': labels})}") or {}
        pods = sorted(found.get("items", []), key=lambda pod: pod["metadata"]["creationTimestamp"])
        started = [pod for pod in pods if pod.get("status", {}).get("phase") != "Pending"]
        return started[-1] if started else None

    def _get(self, name: str) -> dict[str, Any] | None:
        return self._read(f"{self._jobsets}/{quote(name)}")

    def _read(self, path: str) -> dict[str, Any] | None:
        """Return an object of the server, or None if there is no such object."""
        text = self._call("GET", path)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            raise SchedulerUnavailable(f"Kubernetes' answer is no JSON: {text!a:.80}") from None

    def _call(self, method: str, path: str, body: Any = None) -> str | None:
        """Return the server's answer; None if there is no such object."""
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                # Read each time: the kubelet renews it.
                "Authorization": f"Bearer {self._token.read_text().strip()}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=self._tls) as answer:
                return answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            if error.code == 404 and method != "POST":
                return None
            message = _message(error)
            if error.code == 409:
                raise _Conflict(message) from None
            is_unavailable = error.code >= 500 or error.code in _RETRYABLE_CODES
            kind = SchedulerUnavailable if is_unavailable else GangError
            raise kind(f"Kubernetes refuses {method} ({error.code}): {message}") from None
        except (OSError, http.client.HTTPException) as error:  # the latter: an answer that is cut
            raise SchedulerUnavailable(f"Kubernetes does not answer: {error}") from None


class _Conflict(GangError):
    """An object of this name exists."""


def make_jobset(template: Any, spec: GangSpec, *, queue: str | None) -> Any:
    """Return the template as the JobSet of a gang. Changes `template`."""
    labels = template["metadata"].setdefault("labels", {})
    labels.pop(QUEUE, None)
    if queue:
        labels[QUEUE] = queue
    template["metadata"]["name"] = spec.name
    [replicated] = template["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    job["parallelism"] = job["completions"] = spec.nodes
    pod = job["template"]["spec"]
    [term] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    term["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/jobset-name"] = spec.name
    [container] = pod["containers"]
    container["args"] = ["nanochat", *spec.words]
    address = f"{spec.name}-{replicated['name']}-0-0.{spec.name}"
    values = {
        "NANOCHAT_NODES": str(spec.nodes),
        "NANOCHAT_ADDRESS": address,
        "NANOCHAT_STORE": spec.store,
    }
    others = [item for item in container.get("env", []) if item["name"] not in values]
    container["env"] = others + [{"name": name, "value": value} for name, value in values.items()]
    for amounts in container["resources"].values() if spec.gpus is not None else ():
        amounts.pop("nvidia.com/gpu", None)
        if spec.gpus:
            amounts["nvidia.com/gpu"] = spec.gpus
    return template


def _exit_code(pod: Any) -> int | None:
    """Return the exit code of a pod's container; None if it is unknown."""
    for status in pod["status"].get("containerStatuses", []) if pod is not None else ():
        if (end := status.get("state", {}).get("terminated")) is not None:
            return end.get("exitCode")
    return None


def _ended(jobset: Any) -> dict[str, Any] | None:
    """Return the condition that says how a JobSet ended, or None."""
    if "deletionTimestamp" in jobset["metadata"]:  # its pods may still be saving
        return {"type": "Deleted"}
    conditions = jobset.get("status", {}).get("conditions", [])
    ends = [c for c in conditions if c["type"] in _PHASES and c["status"] == "True"]
    return ends[0] if ends else None


def _next_second(time: str) -> str:
    """Return the second after an RFC 3339 time, in the same time zone."""
    moment = datetime.fromisoformat(time[:19]) + timedelta(seconds=1)
    return f"{moment.isoformat()}.000000000{re.sub(r'[.][0-9]+', '', time[19:])}"


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of the server's Status object."""
    try:
        return str(json.loads(error.read())["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
