"""Gangs of Kubernetes: a JobSet each, through the official client.

The JobSet's template is infra/kubernetes/jobset/jobset.yaml, or a changed copy of it. With the name
of a local queue Kueue admits the pods of a JobSet together.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from urllib3.exceptions import HTTPError

from infra.gangs.base import SECONDS, GangError, GangSpec, GangState, Phase, SchedulerUnavailable

TEMPLATE = Path(__file__).parents[1] / "kubernetes" / "jobset" / "jobset.yaml"
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # as pods see it
QUEUE = "kueue.x-k8s.io/queue-name"
_LINES = 2000  # of a log that are read each time; known ones are left out
_PHASES: dict[str, Phase] = {"Completed": "finished", "Failed": "failed"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+")
_RETRYABLE_CODES = (408, 409, 429)  # status codes 4xx that a later request may not get


class Kubernetes:
    """A namespace of a cluster, through its API server; `client` is an ApiClient."""

    def __init__(self, client: Any, namespace: str, *, template: Path, queue: str | None) -> None:
        from kubernetes.client import CoreV1Api, CustomObjectsApi  # here: it takes a second

        # Its calls for JobSets leave it out.
        client.default_headers["Content-Type"] = "application/json"
        self._jobsets = CustomObjectsApi(client)
        self._kind = ("jobset.x-k8s.io", "v1alpha2", namespace, "jobsets")
        self._pods = CoreV1Api(client)
        self._namespace = namespace
        self._template, self._queue = template, queue

    def find(self, name: str) -> str | None:
        """Return the JobSet's name if it exists and has not ended, else None."""
        return name if self.state(name).phase in ("queued", "running") else None

    def submit(self, spec: GangSpec) -> str:
        """Create the JobSet, in place of one of this name that has ended, and return its name."""
        if self._get(spec.name) is not None:
            if self.find(spec.name):
                return spec.name
            self.cancel(spec.name)
        template: Any = yaml.safe_load(self._template.read_text(encoding="utf-8"))
        body = make_jobset(template, spec, queue=self._queue)
        if _ask(self._jobsets.create_namespaced_custom_object, *self._kind, body) is None:
            raise GangError("the cluster has no JobSets", hint="install JobSet's controller")
        return spec.name

    def describe(self, gang: str) -> str:
        """Return the JobSet's name, and the command that shows it."""
        return f"JobSet {gang}: kubectl describe jobset {gang}"

    def state(self, gang: str) -> GangState:
        """Return the JobSet's state."""
        found = self._get(gang)
        if found is None or "deletionTimestamp" in found["metadata"]:  # its pods may still save
            return GangState(phase="cancelled", text="its JobSet was deleted")
        status = found.get("status", {})
        for end in status.get("conditions", []):
            if end["status"] == "True" and (phase := _PHASES.get(end["type"])):
                # Of pod 0: the others end with another code when it fails, or wait for it.
                code = self._exit_code(gang) if phase == "failed" else None
                return GangState(phase=phase, text=end["message"] or end["type"], exit_code=code)
        jobs = status.get("replicatedJobsStatus", [])
        is_running = any(job.get("ready") or job.get("active") for job in jobs)
        text = f"{'active' if is_running else 'waiting'}, {status.get('restarts', 0)} restarts"
        return GangState(phase="running" if is_running else "queued", text=text)

    def cancel(self, name: str) -> None:
        """Delete the JobSet: its pods get SIGTERM, and SIGKILL after their grace period."""
        delete = self._jobsets.delete_namespaced_custom_object
        _ask(delete, *self._kind, name, propagation_policy="Foreground")

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        """Return the new lines of pod 0; `after` is the time of the last one.

        Of more than _LINES between two calls the first are left out; the pod's log has them.
        """
        if (pod := self._find_pod_0(gang)) is None:
            return [], after
        data = _ask(self._read_log, pod.metadata.name) or b""
        # What follows the last newline is a line that is still being written.
        text = data.decode(errors="replace")
        lines = [line.partition(" ") for line in text.split("\n")[:-1]]
        new = [(at, text) for at, _, text in lines if _TIME.fullmatch(at) and at > after]
        return [text for _, text in new], new[-1][0] if new else after

    def _read_log(self, pod: str, **options: Any) -> bytes:
        # As bytes: some versions of the client return the text of a bytes literal.
        read: Any = self._pods.read_namespaced_pod_log
        options |= {"timestamps": True, "tail_lines": _LINES, "_preload_content": False}
        return read(pod, self._namespace, **options).data

    def _get(self, gang: str) -> Any:
        return _ask(self._jobsets.get_namespaced_custom_object, *self._kind, gang)

    def _exit_code(self, gang: str) -> int | None:
        pod = self._find_pod_0(gang)
        statuses: list[Any] = (pod.status.container_statuses or []) if pod else []
        return next((s.state.terminated.exit_code for s in statuses if s.state.terminated), None)

    def _find_pod_0(self, gang: str) -> Any:
        """Return the newest pod 0 of a gang that has started, or None."""
        labels = f"jobset.sigs.k8s.io/jobset-name={gang},batch.kubernetes.io/job-completion-index=0"
        found = _ask(self._pods.list_namespaced_pod, self._namespace, label_selector=labels)
        started = [pod for pod in found.items if pod.status.phase != "Pending"]
        return max(started, key=lambda pod: pod.metadata.creation_timestamp, default=None)


def _ask(verb: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the server's answer; None if there is no such object. Raises GangError."""
    from kubernetes.client import ApiException

    try:
        return verb(*arguments, **options, _request_timeout=SECONDS)
    except ApiException as raised:
        error: Any = raised
        if error.status == 404:
            return None
        is_final = 400 <= (error.status or 0) < 500 and error.status not in _RETRYABLE_CODES
        try:  # the server's Status object
            message = json.loads(error.body)["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        message = f"Kubernetes refuses ({error.status}): {message}"
        raise (GangError if is_final else SchedulerUnavailable)(message) from None
    except HTTPError as error:
        raise SchedulerUnavailable(f"Kubernetes does not answer: {error}") from None


def make_jobset(template: Any, spec: GangSpec, *, queue: str | None) -> Any:
    """Return the template as the JobSet of a gang. Changes `template`."""
    labels = {k: v for k, v in template["metadata"].get("labels", {}).items() if k != QUEUE}
    template["metadata"] |= {
        "name": spec.name,
        "labels": labels | ({QUEUE: queue} if queue else {}),
    }
    [replicated] = template["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    job["parallelism"] = job["completions"] = spec.nodes
    pod = job["template"]["spec"]
    [term] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    term["labelSelector"]["matchLabels"]["jobset.sigs.k8s.io/jobset-name"] = spec.name
    [container] = pod["containers"]
    container["args"] = ["nanochat", *spec.words]
    env = {item["name"]: item for item in container.get("env", [])}
    for name, value in {
        "PET_NNODES": str(spec.nodes),
        "PET_MASTER_ADDR": f"{spec.name}-{replicated['name']}-0-0.{spec.name}",
        "NANOCHAT_STORE": spec.store,
    }.items():
        env[name] = {"name": name, "value": value}
    container["env"] = [*env.values()]
    for amounts in container["resources"].values() if spec.gpus is not None else ():
        amounts.pop("nvidia.com/gpu", None)
        amounts |= {"nvidia.com/gpu": spec.gpus} if spec.gpus else {}
    return template
