"""A stack as a person starts it, in a home of its own, and a toy flow that its workers can run."""

import contextlib
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from infra.prefect.server import find_server, find_supervisor, password_path
from tests.support.prefect_login import Login

DEADLINE = 280.0  # seconds; a stack comes up in 20 on an idle machine
TAGS = ["auto-resume"]

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
    (HOME / f"{name}.temporary").write_text(tempfile.gettempdir())
    (HOME / f"{name}.new").write_text(str(os.getpid()))
    (HOME / f"{name}.new").rename(HOME / f"{name}.pid")  # so that it is never read half written
    try:
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
        code: Path,
        prefix: Sequence[str] = (),  # of each command; it may change the user
    ) -> None:
        self.home = home
        self.taken_port = 0  # the one that `up` was asked for, and another program had
        self.temporary = _make_temporary(home.parent / "temporary")
        self._prefix = prefix
        ours = ("PREFECT_", "NANOCHAT_")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "NANOCHAT_HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(code), *_python_path()]),
            "TMPDIR": str(self.temporary),
        }
        self._ups: list[subprocess.Popen[bytes]] = []
        self._cwd = make_project(home.parent / "project")

    def nanochat(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one command of the command line."""
        return subprocess.run(
            [*self._prefix, sys.executable, "-P", "-m", "flows.cli.app", *words],
            cwd=self._cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )

    def up(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start `nanochat up`; return what it printed once it is up (exit code 0) or has ended."""
        printed = [self.home.parent / f"up-{name}" for name in ("out", "err")]
        with printed[0].open("w") as out, printed[1].open("w") as err:
            command = [*self._prefix, sys.executable, "-P", "-m", "flows.cli.app", "up", *options]
            process = subprocess.Popen(
                command,
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
        return subprocess.CompletedProcess(command, process.returncode or 0, *texts)

    def down(self) -> subprocess.CompletedProcess[str]:
        """Run `nanochat down`, and collect the supervisors that were started here."""
        done = self.nanochat("down")
        while self._ups:
            self._ups.pop().wait(DEADLINE)
        return done

    def show(self, *words: str) -> str:
        """Run one command whose output is a terminal; return what it shows."""
        reader, writer = pty.openpty()
        command = [*self._prefix, sys.executable, "-P", "-m", "flows.cli.app", *words]
        subprocess.run(
            command,
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
        for child in psutil.Process(self.supervisor).children():
            with contextlib.suppress(psutil.Error):
                if f"--pool {pool} " in " ".join(child.cmdline()):
                    return child.pid
        return None

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
        auth = Login(self.api_url, self.password)
        with httpx.Client(auth=auth, timeout=30, trust_env=False) as client:
            method, url = "GET" if body is None else "POST", f"{self.api_url}{path}"
            return client.request(method, url, json=body).raise_for_status().json()

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
                "tags": TAGS,
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

    def processes(self) -> list[psutil.Process]:
        """Every process that has to do with this home."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                is_ours = str(self.home) in " ".join(
                    [*process.cmdline(), *process.environ().values()]
                )
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


def _python_path() -> list[str]:
    """Where the tests find the code, if not only in the environment."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _make_temporary(directory: Path) -> Path:
    """Make a shared directory of temporary files, with Prefect's name for them taken."""
    directory.mkdir(parents=True)
    directory.chmod(0o1777)
    (directory / "runner_storage").write_text("of another user")
    return directory


def make_project(directory: Path) -> Path:
    """The directory of a person whose project has folders with the names of our packages."""
    for name in ("deployments", "flows", "infra", "nanochat_core", "tasks"):
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "__init__.py").write_text("raise RuntimeError('another project')\n")
    return directory


def make_code(directory: Path) -> Path:
    """A directory for PYTHONPATH with the toy flow in it."""
    directory.mkdir()
    (directory / "toy_flow.py").write_text(FLOW)
    return directory


def wait_for(is_so: Callable[[], bool], what: str, *, seconds: float = DEADLINE) -> float:
    """Wait until it is so; gives the seconds that it took."""
    began = time.monotonic()
    while True:
        try:
            if is_so():
                return time.monotonic() - began
        except (OSError, httpx.TransportError):  # no answer at this moment
            pass
        assert time.monotonic() - began < seconds, f"waited {seconds} s for {what}"
        time.sleep(0.1)
