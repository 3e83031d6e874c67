"""Manifests for Kubernetes: rights, time to save, what they start, and that they fit together."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.gangs.kubernetes import TEMPLATE
from infra.launch.rendezvous import Gang, find_gang
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS
from tests.support.infra.deployed import INFRA, MIN_GRACE, ROOT, SECRET, UID, mistake

HERE = INFRA / "kubernetes"
SECONDS_OF_PREFECT = 30  # that `prefect flow-run execute` gives a run which it was told to stop
POOLS = ("cpu", "gpu")
NOT_RUNS = ("register", "resume")  # pods of our image that build nothing
# Where the templates of the pools may differ.
OF_A_POOL = {
    "cpu_request",
    "gpus",
    "home_size",
    "image",
    "memory_request",
    "node_selector",
    "shm_size",
    "tolerations",
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((HERE / name).read_text()))


def template(pool: str) -> dict[str, Any]:
    return json.loads((HERE / f"pool-{pool}.json").read_text())


def default(pool: str, variable: str) -> Any:
    return template(pool)["variables"]["properties"][variable]["default"]


def filled(pool: str) -> dict[str, Any]:
    """Return the Job of a flow run that changes no variable."""
    text = json.dumps(template(pool)["job_configuration"]["job_manifest"])
    for name in template(pool)["variables"]["properties"]:
        value, placeholder = default(pool, name), f"{{{{ {name} }}}}"
        text = text.replace(f'"{placeholder}"', json.dumps(value))
        text = text.replace(placeholder, str(value))
    return json.loads(text)


JOBSET = documents("jobset/jobset.yaml")[0]
WORKERS = documents("workers.yaml")
*RIGHTS, GANGS = documents("gangs.yaml")
STAGE_JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
STAGE = STAGE_JOB["template"]["spec"]["containers"][0]
ENVIRONMENT = {item["name"]: item.get("value", "") for item in STAGE["env"]}
PARAMETERS = documents("jobset/parameters.yaml")[0]["data"]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod that these files make, by what makes it."""
    for pool in POOLS:
        yield f"pool-{pool}", filled(pool)["spec"]["template"]["spec"]
    yield "jobset", STAGE_JOB["template"]["spec"]
    for name in NOT_RUNS:
        yield name, documents(f"{name}.yaml")[0]["spec"]["template"]["spec"]
    for worker in (*WORKERS, GANGS):
        yield worker["metadata"]["name"], worker["spec"]["template"]["spec"]


PODS = dict(pods())
OF_OURS = {name: pod for name, pod in PODS.items() if not name.startswith("worker")}
THAT_TRAIN = {name: pod for name, pod in OF_OURS.items() if name not in NOT_RUNS}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("name", PODS)
def test_no_pod_runs_as_root_or_can_become_it(name: str) -> None:
    assert PODS[name]["securityContext"]["runAsNonRoot"] is True
    for container in containers(PODS[name]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", OF_OURS)
def test_pods_of_our_image_run_as_its_user(name: str) -> None:
    context = OF_OURS[name]["securityContext"]
    assert {str(context[key]) for key in ("runAsUser", "runAsGroup", "fsGroup")} == {UID}
    assert all(c["image"].startswith("nanochat-flows:") for c in OF_OURS[name]["containers"])


@pytest.mark.parametrize("name", THAT_TRAIN)
def test_a_pod_that_trains_has_the_time_to_save_shared_memory_and_a_home_on_disk(
    name: str,
) -> None:
    pod = THAT_TRAIN[name]
    assert pod["terminationGracePeriodSeconds"] >= max(MIN_GRACE, SECONDS_OF_PREFECT + 1)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "medium" not in volumes[mounts["/data"]]["emptyDir"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_grace_shorter_than_saving_takes_is_refused(pool: str) -> None:
    variable = template(pool)["variables"]["properties"]["grace_seconds"]
    assert variable["minimum"] >= MIN_GRACE


@pytest.mark.parametrize("pool", POOLS)
def test_kubernetes_starts_a_flow_run_once_and_prefect_starts_it_again(pool: str) -> None:
    job = filled(pool)["spec"]
    assert job["backoffLimit"] == 0  # anything else would have Prefect give the run up on SIGTERM
    assert (job["completions"], job["parallelism"]) == (1, 1)
    assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("pool", POOLS)
def test_every_placeholder_has_a_variable_and_every_variable_a_place(pool: str) -> None:
    configuration = json.dumps(template(pool)["job_configuration"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", configuration))
    assert used == set(template(pool)["variables"]["properties"])


def test_the_pools_differ_in_the_size_of_their_machines_only() -> None:
    cpu, gpu = template("cpu"), template("gpu")
    assert cpu["job_configuration"] == gpu["job_configuration"]
    of_cpu, of_gpu = (t["variables"]["properties"] for t in (cpu, gpu))
    assert {name for name in of_cpu if of_cpu[name] != of_gpu[name]} == OF_A_POOL
    for name in OF_A_POOL:
        assert {**of_cpu[name], "default": 0} == {**of_gpu[name], "default": 0}
    assert (default("cpu", "gpus"), default("gpu", "gpus")) == (0, 8)


@pytest.mark.parametrize("pool", POOLS)
def test_flow_runs_say_that_they_live_as_often_as_is_waited_for(pool: str) -> None:
    settings = documents("settings.yaml")[0]["data"]
    frequencies = [
        settings["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"],
        default(pool, "env")["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"],
    ]
    assert set(frequencies) == {str(HEARTBEAT_SECONDS)}


def test_the_stage_of_several_nodes_is_a_command_that_there_is() -> None:
    assert mistake(STAGE["args"]) is None


def test_every_parameter_goes_where_kustomize_puts_it() -> None:
    sources: dict[str, list[Any]] = {}
    for item in documents("jobset/kustomization.yaml")[0]["replacements"]:
        name = item["source"]["fieldPath"].removeprefix("data.")
        paths = [path for target in item["targets"] for path in target["fieldPaths"]]
        sources[name] = [str(_at(JOBSET, path)) for path in paths]
    assert set(sources) == set(PARAMETERS)
    for name, values in sources.items():
        assert set(values) == {PARAMETERS[name]}, name


def _at(tree: Any, path: str) -> Any:
    """The value at a path of kustomize's, such as spec.jobs.[name=a].args.2."""
    for part in re.findall(r"\[[^]]+\]|[^.]+", path):
        if isinstance(tree, dict):
            tree = tree[part.strip("[]")]
        elif part.startswith("["):
            key, _, value = part.strip("[]").partition("=")
            tree = next(item for item in tree if item[key] == value)
        else:
            tree = tree[int(part)]
    return tree


def test_the_pods_of_the_jobset_find_each_other_by_a_name_that_stays() -> None:
    job, name = JOBSET["spec"]["replicatedJobs"][0]["name"], JOBSET["metadata"]["name"]
    assert JOBSET["spec"]["network"]["enableDNSHostnames"] is True
    assert STAGE_JOB["completionMode"] == "Indexed"
    [index] = [item for item in STAGE["env"] if item["name"] == "PET_NODE_RANK"]
    # Kubernetes itself writes it in the pods of an indexed Job.
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == path
    assert find_gang(ENVIRONMENT | {"PET_NODE_RANK": "1"}) == Gang(nodes=2, node=1)
    assert ENVIRONMENT["PET_MASTER_ADDR"] == f"{name}-{job}-0-0.{name}"


def test_a_lost_node_restarts_the_jobset_and_an_eviction_costs_nothing() -> None:
    policy = JOBSET["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert STAGE_JOB["backoffLimit"] == 0
    conditions = STAGE_JOB["podFailurePolicy"]["rules"][0]["onPodConditions"]
    assert [item["type"] for item in conditions] == ["DisruptionTarget"]


@pytest.mark.parametrize("name", OF_OURS)
def test_settings_and_secrets_come_from_the_objects_of_these_files(name: str) -> None:
    made = {d["metadata"]["name"] for f in ("settings.yaml", "secrets.example.yaml")
            for d in documents(f)}  # fmt: skip
    for container in OF_OURS[name]["containers"]:
        sources = {next(iter(item.values()))["name"] for item in container["envFrom"]}
        assert sources == made


def test_workers_read_the_templates_that_kustomize_gives_them() -> None:
    generated = documents("kustomization.yaml")[0]["configMapGenerator"][0]
    files = dict(item.split("=") for item in generated["files"])
    for worker, pool in zip(WORKERS, POOLS, strict=True):
        shell, option, line = worker["spec"]["template"]["spec"]["initContainers"][0]["args"]
        start = worker["spec"]["template"]["spec"]["containers"][0]["args"]
        assert (shell, option) == ("sh", "-c")
        for command, verb in zip(line.split("||"), ("create", "update"), strict=True):
            make = command.split()
            assert make[:4] == ["prefect", "work-pool", verb, pool]
            assert "--overwrite" not in make  # resumes a paused pool
            template = make[make.index("--base-job-template") + 1]
            assert (HERE / files[Path(template).name]).exists()
        assert start[:5] == ["prefect", "worker", "start", "--pool", pool]
        assert generated["name"] in json.dumps(worker)


@pytest.mark.parametrize(
    "path", [HERE / "kustomization.yaml", ROOT / "docs" / "guides" / "kubernetes.md"]
)
def test_deployments_are_registered_after_the_workers_have_made_their_pools(path: Path) -> None:
    found = re.findall(
        r"kubectl .*(--kustomize \.|wait deployment|register\.yaml)", path.read_text()
    )
    assert found[:3] == ["--kustomize .", "wait deployment", "register.yaml"]


def test_workers_may_make_jobs_and_runs_may_do_nothing() -> None:
    kinds = {(d["kind"], d["metadata"]["name"]): d for d in documents("access.yaml")}
    rules = kinds["Role", "nanochat-worker"]["rules"]
    verbs = {resource: set(rule["verbs"]) for rule in rules for resource in rule["resources"]}
    assert {"create", "delete", "watch"} <= verbs["jobs"]
    assert "secrets" not in verbs
    assert kinds["ServiceAccount", "nanochat-run"]["automountServiceAccountToken"] is False
    bound = kinds["RoleBinding", "nanochat-worker"]["subjects"]
    assert [subject["name"] for subject in bound] == ["nanochat-worker"]


def test_no_secret_has_a_value_here() -> None:
    example = documents("secrets.example.yaml")[0]["stringData"]
    assert set(example.values()) == {""}
    assert [name for name in documents("settings.yaml")[0]["data"] if SECRET.search(name)] == []
    assert [name for pool in POOLS for name in default(pool, "env") if SECRET.search(name)] == []
    written = {
        item["name"]: item["value"]
        for pod in PODS.values()
        for container in containers(pod)
        for item in container.get("env", [])
        if isinstance(item, dict) and "value" in item and SECRET.search(item["name"])
    }
    # Two say where the secret lies, and not what it is.
    assert written == {
        "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME": "nanochat-secrets",
        "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_KEY": (
            "PREFECT_API_AUTH_STRING"
        ),
    }


def test_what_kustomize_applies_is_there() -> None:
    for folder in (HERE, HERE / "jobset"):
        names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert [name for name in names if not (folder / name).exists()] == []


def test_pods_accept_connections_from_their_own_namespace_alone() -> None:
    (policy,) = documents("network.yaml")

    assert "network.yaml" in documents("kustomization.yaml")[0]["resources"]
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"]["podSelector"] == {}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {}}]}]


def test_prefects_server_accepts_connections_of_our_namespace_at_its_port_alone() -> None:
    (policy,) = documents("prefect-network.yaml")
    server = re.search(
        r"http://([\w-]+)\.([\w-]+)\.svc\S*:(\d+)/api",
        documents("settings.yaml")[0]["data"]["PREFECT_API_URL"],
    )
    assert server is not None
    (rule,) = policy["spec"]["ingress"]

    assert policy["metadata"] == {"name": server[1], "namespace": server[2]}
    assert rule["ports"] == [{"port": int(server[3])}]
    assert {"podSelector": {}} in rule["from"]
    (outside,) = [peer for peer in rule["from"] if "namespaceSelector" in peer]
    (name,) = [d["metadata"]["name"] for d in documents("namespace.yaml")]
    assert outside["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": name}


def test_the_worker_of_gangs_may_do_what_it_does_and_knows_where_its_template_is() -> None:
    pod = GANGS["spec"]["template"]["spec"]
    [container] = pod["containers"]
    words = container["args"]
    assert (
        words[words.index("--pool") + 1]
        in documents("register.yaml")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    values = {item["name"]: item["value"] for item in container["env"]}
    assert (values["NANOCHAT_GANGS"], Path(values["NANOCHAT_JOBSET"]).name) == (
        "kubernetes",
        TEMPLATE.name,
    )
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v.get("configMap", {}).get("name") for v in pod["volumes"]}
    made = {m["name"]: m["files"] for m in documents("kustomization.yaml")[0]["configMapGenerator"]}
    assert made[volumes[mounts[str(Path(values["NANOCHAT_JOBSET"]).parent)]]] == [
        TEMPLATE.relative_to(HERE).as_posix()
    ]
    role = next(item for item in RIGHTS if item["kind"] == "Role")
    rights = {
        (r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]
    }
    assert rights == {
        *(("jobsets", verb) for verb in ("create", "get", "delete")),
        ("pods", "list"),
        ("pods/log", "get"),
    }
