"""Gangs of Kubernetes, at an API server of the test's own that checks every field."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.gangs.base import GangError, GangSpec, SchedulerUnavailable
from infra.gangs.kubernetes import QUEUE, TEMPLATE, Kubernetes
from infra.gangs.open import open_gangs
from infra.launch.rendezvous import Gang, find_gang, find_port
from tests.support.infra.kubernetes_api import Cluster, kubernetes_api

NAME = "pretrain-1a2b3c4d5e6f-0a1b2c"
SPEC = GangSpec(
    name=NAME, nodes=4, gpus=8, words=("stage", '{"stage": "pretrain"}'), store="s3://bucket/runs"
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes_api(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def gangs(cluster: Cluster) -> Kubernetes:
    return open_cluster(cluster)


def open_cluster(
    cluster: Cluster, template: Path = TEMPLATE, queue: str | None = None
) -> Kubernetes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_GANGS", "kubernetes")
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        patch.setenv("NANOCHAT_JOBSET", str(template))
        patch.setenv("NANOCHAT_QUEUE", queue or "")
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        gangs = open_gangs(Path())
    assert isinstance(gangs, Kubernetes)
    return gangs


def container_of(jobset: Any) -> Any:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]["containers"][0]


def add_pod(
    cluster: Cluster, pod: str, number: int, *, index: str = "0", phase: str = "Running"
) -> None:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": NAME,
        "batch.kubernetes.io/job-completion-index": index,
    }
    created = f"2026-11-24T01:00:0{number}Z"
    metadata = {"name": pod, "labels": labels, "creationTimestamp": created}
    cluster.pods.append({"metadata": metadata, "status": {"phase": phase}})


def test_a_gang_is_a_jobset_whose_pods_know_their_place(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    assert gangs.submit(SPEC) == NAME
    jobset = cluster.jobsets[NAME]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    container = container_of(jobset)
    assert container["args"] == ["nanochat", "stage", '{"stage": "pretrain"}']
    values = {item["name"]: item.get("value", "3") for item in container["env"]}
    assert values["NANOCHAT_STORE"] == "s3://bucket/runs"
    assert find_gang(values) == Gang(nodes=4, node=3)  # the index is each pod's own
    assert values["PET_MASTER_ADDR"] == f"{NAME}-workers-0-0.{NAME}"
    [term] = job["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert set(term["labelSelector"]["matchLabels"].values()) == {NAME}


@pytest.mark.parametrize(("gpus", "found"), [(None, 8), (2, 2), (0, None)])
def test_the_gpus_of_a_request_replace_the_templates(
    cluster: Cluster, gangs: Kubernetes, gpus: int | None, found: int | None
) -> None:
    gangs.submit(replace(SPEC, gpus=gpus))
    amounts = container_of(cluster.jobsets[NAME])["resources"]
    assert [part.get("nvidia.com/gpu") for part in amounts.values()] == [found, found]


@pytest.mark.parametrize("queue", [None, "research"])
def test_kueue_is_asked_only_where_there_is_a_queue(cluster: Cluster, queue: str | None) -> None:
    open_cluster(cluster, queue=queue).submit(SPEC)
    assert cluster.jobsets[NAME]["metadata"]["labels"] == ({QUEUE: queue} if queue else {})


def test_a_template_with_a_misspelt_field_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    template = yaml.safe_load(TEMPLATE.read_text())
    template["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    path = tmp_path / "jobset.yaml"
    path.write_text(yaml.safe_dump(template))
    with pytest.raises(GangError, match=r"refuses \(422\): .*backofLimit") as caught:
        open_cluster(cluster, path).submit(SPEC)
    assert not isinstance(caught.value, SchedulerUnavailable)


def test_a_name_of_the_longest_stage_leaves_room_for_the_pods_number(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    from flows.building.gangs import gang_name
    from flows.building.stage_request import StageRequest
    from flows.run_request import MAX_NODES
    from flows.stages import STAGES

    for stage in STAGES:
        request = StageRequest(
            stage=stage.name, fingerprint="ab" * 32, inputs=(), profile="tiny", run="r", store="s"
        )
        gangs.submit(replace(SPEC, name=gang_name(request), nodes=MAX_NODES))
    assert len(cluster.jobsets) == len(STAGES)


def test_the_states_of_a_gang(cluster: Cluster, gangs: Kubernetes) -> None:
    assert gangs.find(NAME) is None
    gangs.submit(SPEC)
    assert gangs.find(NAME) == NAME
    assert gangs.state(NAME).phase == "queued"
    status = cluster.jobsets[NAME]["status"]
    status |= {
        "restarts": 2,
        "replicatedJobsStatus": [{"name": "workers", "active": 1, "ready": 0}],
    }
    assert (gangs.state(NAME).phase, gangs.state(NAME).text) == ("running", "active, 2 restarts")
    cluster.end(NAME, "Completed", "all jobs completed")
    assert gangs.state(NAME).phase == "finished"
    cluster.end(NAME, "Failed", "jobset failed due to reaching max number of restarts")
    assert gangs.state(NAME).phase == "failed"
    assert "max number of restarts" in gangs.state(NAME).text
    assert gangs.find(NAME) is None
    gangs.cancel(NAME)
    gangs.cancel(NAME)
    assert gangs.state(NAME).phase == "cancelled"


def test_a_gang_that_failed_has_the_exit_code_of_pod_0(cluster: Cluster, gangs: Kubernetes) -> None:
    gangs.submit(SPEC)
    for number, code in enumerate((75, 1)):  # of an earlier attempt, and of the last
        add_pod(cluster, f"pod-{number}", number, phase="Failed")
        state = {"terminated": {"exitCode": code}}
        container = {"name": "stage", "image": "i", "imageID": "i", "ready": False}
        status = {**container, "restartCount": 0, "state": state}
        cluster.pods[-1]["status"]["containerStatuses"] = [status]
    add_pod(cluster, "other", 2, index="1", phase="Failed")
    cluster.end(NAME, "Failed", "jobset failed")
    assert gangs.state(NAME).exit_code == 1
    cluster.pods.clear()
    assert gangs.state(NAME).exit_code is None


def test_a_gang_that_ended_makes_room_for_the_next_and_one_that_runs_does_not(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    gangs.submit(SPEC)
    gangs.submit(SPEC)  # two callers at the same moment
    assert not any(request.startswith("DELETE") for request in cluster.requests)
    cluster.jobsets[NAME]["metadata"]["deletionTimestamp"] = "2026-11-24T01:00:00Z"
    assert gangs.find(NAME) is None
    assert gangs.state(NAME).phase == "cancelled"
    for _ in range(2):  # one that is being deleted, and one that has failed
        cluster.deleting.add(NAME)
        with pytest.raises(SchedulerUnavailable, match="already exists"):
            gangs.submit(SPEC)
        cluster.deleting.clear()
        gangs.submit(SPEC)
        assert gangs.find(NAME) == NAME
        cluster.end(NAME, "Failed")


def test_the_lines_of_pod_0_come_once_also_after_a_restart(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    gangs.submit(SPEC)
    assert gangs.logs(NAME, "") == ([], "")

    add_pod(cluster, "first", 1)
    add_pod(cluster, "other", 1, index="1")
    cluster.logs = {
        "first": [
            "2026-11-24T01:00:02.100000000Z one",
            "2026-11-24T01:00:02.200000000Z 10 %\r20 %\r9",
            "no time at all",
        ],
        "second": ["2026-11-24T01:00:09.000000000Z three"],
    }
    lines, after = gangs.logs(NAME, "")
    assert lines == ["one", "10 %\r20 %\r9"]
    cluster.logs["first"].append("2026-11-24T01:00:02.300000000Z more")
    lines, after = gangs.logs(NAME, after)
    assert lines == ["more"]
    add_pod(cluster, "second", 8, phase="Pending")
    assert gangs.logs(NAME, after) == ([], after)
    cluster.pods[-1]["status"]["phase"] = "Running"
    lines, after = gangs.logs(NAME, after)
    assert lines == ["three"]
    assert gangs.logs(NAME, after) == ([], after)


def test_of_a_burst_of_lines_the_last_come_and_none_twice(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    add_pod(cluster, "first", 1)
    times = [f"2026-11-24T01:00:02.{part:09}+02:00" for part in range(1, 9_001)]
    cluster.logs["first"] = [f"{time} x" for time in times[:8_000]]
    assert gangs.logs(NAME, "") == (["x"] * 2000, times[7_999])
    cluster.logs["first"] += [f"{time} y" for time in times[8_000:]]
    assert gangs.logs(NAME, times[7_999]) == (["y"] * 1000, times[-1])


def test_a_server_in_trouble_is_asked_again_and_one_that_refuses_is_not(
    cluster: Cluster, gangs: Kubernetes
) -> None:
    cluster.broken = 1
    with pytest.raises(SchedulerUnavailable, match="etcd has no leader"):
        gangs.state(NAME)
    cluster.write_kubeconfig(token="expired")
    with pytest.raises(GangError, match=r"\(401\): Unauthorized") as caught:
        open_cluster(cluster).state(NAME)
    assert not isinstance(caught.value, SchedulerUnavailable)
    gangs.submit(SPEC)
    cluster.promised = 10**6
    with pytest.raises(SchedulerUnavailable, match="does not answer"):
        gangs.state(NAME)
    cluster.url = f"http://127.0.0.1:{find_port()}"
    cluster.write_kubeconfig()
    with pytest.raises(SchedulerUnavailable, match="does not answer"):
        open_cluster(cluster).state(NAME)


def test_a_cluster_without_jobsets_is_refused(cluster: Cluster, gangs: Kubernetes) -> None:
    cluster.has_jobsets = False
    with pytest.raises(GangError, match="the cluster has no JobSets") as caught:
        gangs.submit(SPEC)
    assert not isinstance(caught.value, SchedulerUnavailable)
