"""The scheduler that this machine's worker asks for gangs."""

import os
from pathlib import Path

from infra.gangs.base import Gangs
from infra.gangs.kubernetes import TEMPLATE, Kubernetes
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
        case "kubernetes" if host := os.environ.get("KUBERNETES_SERVICE_HOST"):
            host = f"[{host}]" if ":" in host else host  # IPv6
            return Kubernetes(
                f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}",
                template=Path(os.environ.get("NANOCHAT_JOBSET") or TEMPLATE),
                queue=os.environ.get("NANOCHAT_QUEUE"),
            )
        case other:
            raise ConfigError(
                f"NANOCHAT_GANGS is {other!a}", hint="slurm, or in a pod of a cluster kubernetes"
            )
