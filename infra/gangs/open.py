"""The scheduler that this machine's worker asks for gangs."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from infra.gangs.base import Gangs
from infra.gangs.slurm import Slurm
from nanochat_core.errors import ConfigError


def open_gangs(home: Path) -> Gangs | None:
    """Return the scheduler that NANOCHAT_GANGS names. None: stages are built on this machine.

    slurm: logs of jobs go to `home`/gangs. kubernetes: NANOCHAT_JOBSET is the template's path, by
    default the one of the package; NANOCHAT_QUEUE is Kueue's local queue, if there is one.
    """
    match os.environ.get("NANOCHAT_GANGS", ""):
        case "":
            return None
        case "slurm":
            return Slurm(home / "gangs")
        case "kubernetes" if importlib.util.find_spec("kubernetes"):
            return _open_kubernetes()
        case "kubernetes":
            raise ConfigError(
                "NANOCHAT_GANGS=kubernetes needs the package kubernetes, which is not installed",
                hint="pip install 'nanochat-flows[kubernetes]'",
            )
        case other:
            raise ConfigError(f"NANOCHAT_GANGS is {other!a}", hint="slurm or kubernetes")


def _open_kubernetes() -> Gangs:
    """Return the cluster of this pod, else of the kubeconfig. Raises ConfigError."""
    # Imported late: the client takes a second.
    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import ConfigException

    from infra.gangs.kubernetes import NAMESPACE, TEMPLATE, Kubernetes

    load: Any = config
    configuration: Any = Configuration()
    try:
        load.load_incluster_config(configuration)
        namespace = NAMESPACE.read_text().strip()
    except ConfigException:
        file = os.environ.get("KUBECONFIG")
        try:
            load.load_kube_config(file, client_configuration=configuration)
            context = load.list_kube_config_contexts(file)[1]["context"]
        except ConfigException as error:
            raise ConfigError(
                f"NANOCHAT_GANGS=kubernetes finds no cluster: {error}",
                hint="run the worker in a pod, or name a kubeconfig in KUBECONFIG",
            ) from None
        namespace = context.get("namespace", "default")
    return Kubernetes(
        ApiClient(configuration),
        namespace,
        template=Path(os.environ.get("NANOCHAT_JOBSET") or TEMPLATE),
        queue=os.environ.get("NANOCHAT_QUEUE"),
    )
