"""A stack as a person starts it, in a home of its own, and a toy flow that its workers can run.

A process belongs to a home when the home is named in its environment or on its command line: the
programs that `up` starts, what they start, and orphans of theirs.
"""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from infra.prefect.server import find_server, find_supervisor, password_path
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.waiting import wait_until

DEADLINE = 400.0  # seconds; a stack comes up in 20 on an idle machine, `up` gives its server 240
Kind = Literal["job", "agent", "flow", "worker", "server", "supervisor", "other"]
# What is on the command line of each kind of process. An agent's names its job's worker too.
MARKS: dict[Kind, str] = {
    "agent": "infra.launch.agent",
    "job": "nanochat_core.worker",
    "flow": "prefect.engine",
    "worker": "worker start",
    "server": "server start",
    "supervisor": "flows.cli.app up",
}

# Says in files of the home what happens to it. Its name is that of a flow that may be resumed.
FLOW = """
import os
import tempfile
import time
from pathlib import Path

from prefect import flow

from infra.prefect.supervisor.workers import end_with_worker

HOME = Path(os.environ["NANOCHAT_HOME"])


@flow(name="nanochat-eval", retries=0)
def toy(name: str) -> None:
    end_with_worker()
    try:  # from here on: once its number can be read, it may be ended at any time
        (HOME / f"{name}.temporary").write_text(tempfile.gettempdir())
        (HOME / f"{name}.new").write_text(str(os.getpid()))
        (HOME / f"{name}.new").rename(HOME / f"{name}.pid")  # it is never read half written
        while not (HOME / f"{name}.go").exists():
            time.sleep(0.1)
    except BaseException:
        (HOME / f"{name}.saved").touch()
        raise
"""


class LiveStack:
    """The command line in one home, and the API of its server."""

    def __init__(
        self,
        home: Path,
        *,
        prefix: Sequence[str] = (),  # of each command; it may change the user
        port: int = 4200,  # of `start`
        patience: float = 60.0,  # seconds for a server that does not answer `api`
        environment: Mapping[str, str] = {},  # of the person
    ) -> None:
        self.home = home
        self.port = port
        self.patience = patience
        self.api: PrefectApi  # once it has started
        self.temporary = make_temporary(home.parent / "temporary")
        self._prefix = prefix
        ours, code = ("PREFECT_", "NANOCHAT_"), str(make_code(home.parent / "code"))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "NANOCHAT_HOME": str(home),
            # Without empty names, which would be the current directory.
            "PYTHONPATH": os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH")])),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._ours: dict[tuple[int, float], bool] = {}  # pid and start -> whether it names the home
        self._ups: list[subprocess.Popen[bytes]] = []
        self._cwd = make_project(home.parent / "project")

    def nanochat(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one command of the command line."""
        return subprocess.run(
            self._argv(*words),
            cwd=self._cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    def _argv(self, *words: str) -> list[str]:
        return [*self._prefix, sys.executable, "-P", "-m", "flows.cli.app", *words]

    def command(self, *words: str) -> str:
        """Run one command to its end, which must be a good one; return what it printed."""
        done = self.nanochat(*words)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"nanochat {words}: {said[-6000:]}"
        assert "Traceback" not in said, said
        return said

    def start(self) -> None:
        """Bring the stack up on its port, and connect to its server."""
        done = self.up("--port", str(self.port))
        assert done.returncode == 0, done.stdout + done.stderr
        if hasattr(self, "api"):
            self.api.close()
        self.api = PrefectApi(self.api_url, password=self.password, patience=self.patience)

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if hasattr(self, "api"):
            self.api.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.down()
        for process in self.processes():
            kill(process)

    def up(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start `nanochat up`; return what it printed once it is up (exit code 0) or has ended."""
        printed = [self.home.parent / f"up-{name}" for name in ("out", "err")]
        with printed[0].open("w") as out, printed[1].open("w") as err:
            process = subprocess.Popen(
                self._argv("up", *options),
                cwd=self._cwd,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._ups.append(process)
        wait_for(
            lambda: process.poll() is not None or "(or Ctrl-C here" in printed[0].read_text(), "up"
        )
        texts = [path.read_text() for path in printed]
        assert process.returncode != 0 or "(or Ctrl-C here" in texts[0], "a signal ended it"
        return subprocess.CompletedProcess(process.args, process.returncode or 0, *texts)

    def down(self) -> subprocess.CompletedProcess[str]:
        """Run `nanochat down`, and collect the supervisors that were started here."""
        done = self.nanochat("down")
        while self._ups:
            self._ups.pop().wait(DEADLINE)
        return done

    def show(self, *words: str) -> str:
        """Run one command whose output is a terminal; return what it shows."""
        reader, writer = pty.openpty()
        subprocess.run(
            self._argv(*words),
            cwd=self._cwd,
            env=self.environment,
            stdout=writer,
            stderr=writer,
            timeout=DEADLINE,
            check=True,
        )
        with os.fdopen(reader, "rb", buffering=0) as terminal:
            shown = terminal.read(4096).decode()
        os.close(writer)
        return shown

    @property
    def supervisor(self) -> int:
        """The pid of the supervisor."""
        found = find_supervisor(self.home)
        assert found is not None
        return found.pid

    def worker(self, pool: str) -> int | None:
        """The pid of the pool's worker, while it lives."""
        return next((process.pid for process in self.workers_of(pool)), None)

    @property
    def workers(self) -> list[int | None]:
        """The pids of the workers of cpu and gpu."""
        return [self.worker("cpu"), self.worker("gpu")]

    @property
    def api_url(self) -> str:
        """The address of the API. Raises ConnectionError while no server runs."""
        if shared := self.environment.get("PREFECT_API_URL"):
            return shared
        if (found := find_server(self.home)) is None:
            raise ConnectionError("no server runs")
        return found.api_url

    @property
    def server(self) -> int | None:
        """The pid of the home's own server, while it lives."""
        found = find_server(self.home)
        return found and found.pid

    @property
    def password(self) -> str:
        """`user:password` of the server."""
        given = self.environment.get("PREFECT_API_AUTH_STRING")
        return given or password_path(self.home).read_text().strip()

    def ask(self, path: str, body: Any = None) -> Any:
        """The API's answer to a GET, or to a POST of `body`."""
        api = PrefectApi(self.api_url, password=self.password, patience=0.0)
        with contextlib.closing(api):
            return api.get(path) if body is None else api.post(path, body)

    def deploy_toy(self) -> None:
        """Make the deployment of the toy flow."""
        flow = self.ask("/flows/", {"name": "nanochat-eval"})
        self.ask(
            "/deployments/",
            {
                "name": "toy",
                "flow_id": flow["id"],
                "entrypoint": "toy_flow.toy",
                "work_pool_name": "cpu",
                "tags": ["auto-resume"],
            },
        )

    def start_toy(self, name: str) -> str:
        """Trigger a run as Prefect's pages do; gives its id once its process waits."""
        deployment = self.ask("/deployments/name/nanochat-eval/toy")["id"]
        run = self.ask(f"/deployments/{deployment}/create_flow_run", {"parameters": {"name": name}})
        wait_for(lambda: (self.home / f"{name}.pid").exists(), f"the start of {name}")
        return run["id"]

    def finish_toy(self, name: str) -> None:
        """Let it come to its end."""
        (self.home / f"{name}.go").touch()

    def state(self, run: str) -> str:
        return self.ask(f"/flow_runs/{run}")["state"]["name"]

    def wait_for_state(self, run: str, *names: str) -> None:
        wait_for(lambda: self.state(run) in names, f"{run} to be {names}")

    def processes(self, *kinds: Kind) -> list[psutil.Process]:
        """Live processes of this home, of the kinds given or of all."""
        found = [p for p in psutil.process_iter() if self._owns(p)]
        return [p for p in found if not kinds or kind_of(p) in kinds]

    def workers_of(self, pool: str) -> list[psutil.Process]:
        """Prefect workers of a pool, of whatever supervisor."""
        return [p for p in self.processes("worker") if pool in command_line(p)]

    def engines(self, run: str) -> list[psutil.Process]:
        """Processes in which a flow run executes."""
        found = self.processes("flow")
        return [p for p in found if environment_of(p).get("PREFECT__FLOW_RUN_ID") == run]

    def _owns(self, process: psutil.Process) -> bool:
        """Return whether a process names the home: asked once, what one was started with stays."""
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            key = process.pid, process.create_time()
        except psutil.Error:
            return False
        if key not in self._ours:
            words = [*command_line(process), *environment_of(process).values()]
            self._ours[key] = str(self.home) in " ".join(words)
        return self._ours[key]


def kind_of(process: psutil.Process) -> Kind:
    """Return what part a process plays."""
    line = " ".join(command_line(process))
    for kind, mark in MARKS.items():
        if mark in line:
            return kind
    return "other"


def command_line(process: psutil.Process) -> list[str]:
    """Return its words; none of one that has ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return what it was started with; nothing of one that has ended or is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def make_temporary(directory: Path) -> Path:
    """Make a shared directory of temporary files, with Prefect's name for them taken."""
    directory.mkdir(parents=True)
    directory.chmod(0o1777)
    (directory / "runner_storage").write_text("of another user")
    return directory


def make_project(directory: Path) -> Path:
    """Make a person's project, which has folders with the names of our packages."""
    for name in ("deployments", "flows", "infra", "nanochat_core", "tasks"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("raise RuntimeError('another project')\n")
    return directory


def make_code(directory: Path) -> Path:
    """Make a directory for PYTHONPATH with the toy flow in it."""
    directory.mkdir()
    (directory / "toy_flow.py").write_text(FLOW)
    return directory


def wait_for(is_so: Callable[[], bool], what: str, *, seconds: float = DEADLINE) -> float:
    """Wait until it is so; gives the seconds that it took."""
    began = time.monotonic()

    def holds() -> bool:
        with contextlib.suppress(OSError, httpx.TransportError):  # no answer at this moment
            return is_so()
        return False

    wait_until(holds, seconds=seconds, what=what, every=0.1)
    return time.monotonic() - began
