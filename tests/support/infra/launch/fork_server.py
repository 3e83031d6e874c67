"""Start the jobs of tests without importing large packages in each: fork them from one that has.

While `installed()` is open, subprocess.Popen starts the workers and agents of a launcher, or with
`every` all Python programs, by a request to a fork server: a fresh interpreter with the environment
of the first such process, which has imported PACKAGES and none of our code. The new process is a
child of the process that asked, as after fork and exec, with the streams, environment, directory,
session and command line that were asked for; it sees a package as loaded once it has imported it.

A request that this cannot serve exactly starts a process as usual: an environment that the
interpreter or a library has already read, any rarer Popen option.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

WORKER, AGENT = "nanochat_core.worker", "infra.launch.agent"
LAUNCHER = "NANOCHAT_LAUNCHER"  # which a launcher sets for its workers
ENTRIES = (  # which import torch
    "train.pretrain",
    "train.midtrain",
    "train.sft",
    "train.rl",
    "evaluate.base",
    "evaluate.chat",
)
# Package -> what is imported of it. Each needs numpy, and none another.
PACKAGES = {
    "numpy": ("numpy.random",),
    "pyarrow": ("pyarrow.parquet",),
    "torch": ("torch", "torch._dynamo", "torch.distributed.run"),  # for the first job that does
}
# What these variables say is read after the fork. Any other must be what the server started with.
FREE = ("NANOCHAT_", "PREFECT_", "PYTEST_", "AWS_", "RANK", "LOCAL_", "GROUP_", "ROLE_")
FREE += ("WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_", "CUBLAS_")
FREE += ("PYTHONPATH", "GLOO_", "NCCL_", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "DO_NOT_TRACK")
FREE += ("NO_PROXY", "no_proxy")
MAX_SERVERS = 3  # of up to 200 MB each, of one process; the one that was not used longest ends
_TITLE = "-" * 1000  # an argument of the server: its memory takes the command lines of the children
_STANDARD = sys.stdlib_module_names
_PR_SET_CHILD_SUBREAPER = 36

_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class _Server:
    """The launcher's end of a fork server."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.connection = connection
        self.environment = _fixed(environment)
        self.process = process

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> "_Server":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), _TITLE]
            quiet = subprocess.DEVNULL
            own = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
            process = subprocess.Popen(
                command, env=own, stdin=quiet, stdout=quiet, pass_fds=(theirs.fileno(),)
            )
        return cls(ours, environment, process)

    def close(self) -> None:
        """End the server, which ends with its connection."""
        self.connection.close()
        if self.process is not None:
            self.process.wait()

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process id of a new child of this process."""
        libc = ctypes.CDLL(None)
        # The server's grandchild is an orphan, which its nearest subreaper adopts: this process.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self.connection, [json.dumps(request).encode()], streams)
            answer = self.connection.recv(32)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the fork server has ended"
        return int(answer)


class _Launcher:
    """Servers of this process, and the Popen method that uses them."""

    def __init__(self, servers: list[_Server], *, every: bool) -> None:
        self._servers = servers
        self._every = every
        self._lock = threading.Lock()

    def install(self) -> None:
        launcher = self

        def execute_child(process: Any, args: Any, *rest: Any) -> None:
            (executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes) = rest
            *pipes, _, gid, gids, uid, umask, session, group = pipes
            rare = (executable, preexec_fn, pass_fds, shell or None, gid, gids, uid)
            plain = not any(rare) and (umask, group) == (-1, -1)
            environment = os.environ if env is None else env
            server = launcher.server_for(args, environment) if plain else None
            if server is None:
                _execute_child(process, args, *rest)
                return
            sys.audit("subprocess.Popen", args[0], args, cwd, env)
            request = {
                "args": [os.fspath(word) for word in args],
                "environment": dict(environment),
                "directory": os.fspath(cwd or os.getcwd()),
                "session": bool(session),
                "torch": launcher._every or _imports_torch(args),
                "every": launcher._every,
            }
            standard = [pipes[0], pipes[3], pipes[5]]  # our end of each is between
            streams = [number if fd == -1 else fd for number, fd in enumerate(standard)]
            with launcher._lock:
                process.pid = server.fork(request, streams)
            process._child_created = True
            process._close_pipe_fds(*pipes)

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def server_for(self, args: Any, environment: Mapping[str, str]) -> _Server | None:
        if isinstance(args, str | bytes | os.PathLike):
            return None
        if not (_is_python([*args]) if self._every else _is_served([*args], environment)):
            return None
        fixed = _fixed(environment)
        with self._lock:
            for server in self._servers:
                if server.environment == fixed:
                    self._servers.remove(server)
                    break
            else:
                if len(self._servers) == MAX_SERVERS:
                    self._servers.pop(0).close()
                server = _Server.start(environment)
            self._servers.append(server)  # the last is the one that was used last
            return server

    def close(self) -> None:
        for server in self._servers:
            server.close()


@contextlib.contextmanager
def installed(*, every: bool = False) -> Iterator[None]:
    """Start workers and agents by a fork server while this is open; on Linux, elsewhere as usual.

    `every`: all Python programs instead, also those that such a program starts.
    """
    launcher = _Launcher([], every=every)
    if sys.platform == "linux":
        launcher.install()
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        launcher.close()


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(FREE)}


def _is_python(args: list[Any]) -> bool:
    """Return whether the command starts a module or a file by this interpreter, no fork server."""
    what = str(args[1]) if args[:1] == [sys.executable] and args[1:] else ""
    return what == "-m" or (what.endswith(".py") and what != __file__)


def _is_served(args: list[Any], environment: Mapping[str, str]) -> bool:
    """Return whether the command starts a worker or an agent for a launcher."""
    # torchrun adds -u, which PYTHONUNBUFFERED has asked for already.
    words = [word for word in args[:4] if word != "-u"]
    is_ours = words[:3] in ([sys.executable, "-m", WORKER], [sys.executable, "-m", AGENT])
    return is_ours and LAUNCHER in environment and Path(str(args[-1])).is_file()


def _imports_torch(args: Any) -> bool:
    entry = str(json.loads(Path(str(args[-1])).read_text(encoding="utf-8"))["entry"])
    return AGENT in args or entry.removeprefix("nanochat_core.") in ENTRIES


class _Packages(MetaPathFinder, Loader):
    """Packages that the server has imported, which a process that imports them finds loaded."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, types.ModuleType]] = {}  # package -> all it has imported
        self._own = set(sys.modules)
        sys.meta_path.insert(0, self)

    def load(self, package: str) -> None:
        """Import a package, unless that is done, and take it out of sys.modules."""
        if package in self._groups:
            return
        for name in PACKAGES[package]:
            importlib.import_module(name)
        known = {name for modules in self._groups.values() for name in modules}
        loaded = {name: module for name, module in sys.modules.items() if name not in self._own}
        loaded = {n: m for n, m in loaded.items() if n.partition(".")[0] not in _STANDARD}
        self._groups[package] = {n: m for n, m in loaded.items() if n not in known}
        for name in loaded:
            del sys.modules[name]
        gc.freeze()  # or a child's first collection would copy all of the memory

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module that was taken out is; None if it was never imported."""
        for package, modules in self._groups.items():
            if (module := modules.get(fullname)) is not None:
                return ModuleSpec(fullname, self, loader_state=(package, module.__spec__))
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Put back all that an import of the module would load; return the module."""
        package, top = spec.loader_state[0], spec.name.partition(".")[0]
        modules = self._groups[package]
        if top == package:
            sys.modules.update(self._groups["numpy"] | modules)
        sys.modules.update({n: m for n, m in modules.items() if n.partition(".")[0] == top})
        return modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it as it was loaded."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state[1]

    def seed(self) -> None:
        """Seed generators at random, as an import does."""
        self._groups["numpy"]["numpy.random"].seed()  # type: ignore[attr-defined]
        if "torch" in self._groups:
            self._groups["torch"]["torch"].default_generator.seed()  # type: ignore[attr-defined]


def _serve(connection: socket.socket, packages: _Packages) -> NoReturn:
    """Fork a process a request; in it, run the program that was asked for."""
    while True:
        message, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        request, launcher = json.loads(message), os.getppid()
        if request["torch"]:
            packages.load("torch")
        if middle := os.fork():
            os.waitpid(middle, 0)
            for stream in streams:
                os.close(stream)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:  # it ends at once
            pass
        _run(request, streams, connection, launcher, packages)


def _run(
    request: dict[str, Any],
    streams: list[int],
    connection: socket.socket,
    launcher: int,
    packages: _Packages,
) -> NoReturn:
    """Make this process what exec would have made of it, then run the program."""
    if request["session"]:
        os.setsid()
    if os.getppid() == launcher:
        connection.send(str(os.getpid()).encode())
    connection.detach()
    for number, stream in enumerate(streams):  # none has a number below 3: the server's are open
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    command = [word for word in request["args"] if word != "-u"]
    script = None if command[1] == "-m" else command[1]
    own = [] if sys.flags.safe_path else [os.path.abspath(os.path.dirname(script or ""))]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*own, *(os.path.abspath(path) for path in paths if path), *_PATH]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if request["every"] or command[2] == AGENT:
        _open_own_server(packages, every=request["every"])
    _set_title(command)
    sys.orig_argv = command
    sys.argv = command[1:] if script else ["-m", *command[3:]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__annotations__ = {}
    packages.seed()
    if any(os.path.exists(os.path.join(path, "sitecustomize.py")) for path in paths if path):
        importlib.import_module("sitecustomize")  # as an interpreter does when it starts
    code = 0
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # taking torch's modules apart would cost half as much as importing them


def _open_own_server(packages: _Packages, *, every: bool) -> None:
    """Fork a server for what this process starts: the ranks of an agent must be its children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _serve(theirs, packages)
    theirs.close()
    _Launcher([_Server(ours, os.environ)], every=every).install()


def _set_title(command: list[str]) -> None:
    """Set what /proc says of the command line: tests find processes by it."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# Without the directory of this file, which Python puts first where it is started as a program.
_PATH = sys.path[:] if sys.flags.safe_path or __name__ != "__main__" else sys.path[1:]

if __name__ == "__main__":
    loaded = _Packages()
    for name in ("numpy", "pyarrow"):
        loaded.load(name)
    _serve(socket.socket(fileno=int(sys.argv[1])), loaded)
