"""A Slurm cluster of two nodes on this machine: controller, two node daemons, its own munge.

Needs root and Debian's packages slurm-wlm and munge; no accounting, no cgroups.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.support.flows.waiting import wait_until
from tests.support.infra.ports import quiet_port

INSTALL = "apt-get install -y slurm-wlm munge"
SECONDS = 60.0
# A requeued job waits until credentials have expired, by default 120 s.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
JobRequeue=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why there can be no cluster here, or None."""
    if missing := [n for n in ("slurmctld", "slurmd", "munged") if shutil.which(n) is None]:
        return f"no {missing[0]}: {INSTALL}"
    return None if os.geteuid() == 0 else "slurmd needs root"


def run(*words: str) -> str:
    """Return the output of a command of Slurm."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Generator[Path]:
    """Run a cluster in a directory; yield the path of its configuration, for SLURM_CONF."""
    for name in ("state", "spool-n1", "spool-n2"):
        (directory / name).mkdir()
    ports = {name: quiet_port() for name in ("controller", "first", "second")}
    configuration = directory / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname(), directory=directory, **ports)
    )
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--{what}={directory}/munge.{what.split('-')[0]}" for what in ("socket", "pid-file")),
        *(f"--{what}={directory}/munge.{what.split('-')[0]}" for what in ("log-file", "seed-file")),
    ]
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    daemons = [
        munge,
        ["slurmctld", "-D", "-f", str(configuration)],
        *(["slurmd", "-D", "-N", node, "-f", str(configuration)] for node in ("n1", "n2")),
    ]
    with contextlib.ExitStack() as stack:
        for words in daemons:
            with (directory / f"{words[0]}.out").open("ab") as out:
                process = subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if words is munge:
                wait_until((directory / "munge.socket").exists)
        wait_until(lambda: _idle(configuration))
        yield configuration
        subprocess.run(["scancel", "--user=root"], env=environment, check=False)
        wait_until(lambda: not _call(configuration, "squeue", "--noheader"))


def _idle(configuration: Path) -> bool:
    return _call(configuration, "sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"]


def _call(configuration: Path, *words: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout
