"""What makes a sandbox on this machine: bubblewrap and its options, or why none starts."""

import functools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.base import TaskError
from tasks.sandbox_syscalls import syscall_filter

USER = 61234  # and group, of what root starts: nobody's, so that no file and no process is its own
TMP_BYTES = 32 << 20
NUM_PROCESSES = 8  # threads count, and bubblewrap's own first process
NUM_OPEN_FILES = 64
FILE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class SandboxTools:
    """The programs that make the sandbox, absolute paths; `drop` is empty unless root runs us."""

    drop: tuple[str, ...]
    bwrap: str
    prlimit: str
    python: str
    options: tuple[str, ...]  # of bubblewrap


def open_filter() -> int:
    """The reading end of a pipe that holds the filter of system calls, for one sandbox."""
    data = syscall_filter(os.uname().machine)
    reading, writing = os.pipe()
    os.write(writing, data)  # under 1 KiB: fits
    os.close(writing)
    return reading


def sandbox_command(
    tools: SandboxTools, source: str, *, filter_fd: int, seconds: float, memory_mb: int
) -> list[str]:
    """The command that runs Python source in a sandbox, under limits that it cannot raise.

    `filter_fd` is that of `open_filter`, handed to the command under the same number.
    """
    limits = {
        "core": 0,
        "cpu": math.ceil(seconds) + 1,
        "as": memory_mb << 20,
        "fsize": FILE_BYTES,
        "nofile": NUM_OPEN_FILES,
        "nproc": NUM_PROCESSES,  # set inside, where it counts the processes of this sandbox only
    }
    return [
        *tools.drop,
        tools.bwrap,
        *tools.options,
        *("--seccomp", str(filter_fd)),
        "--",
        tools.prlimit,
        *(f"--{name}={value}" for name, value in limits.items()),
        "--",
        *(tools.python, "-I", "-S", "-B", "-X", "utf8", "-c", source),
    ]


def open_sandbox_tools() -> SandboxTools:
    """What makes the sandbox on this machine. Raises TaskError when it does not work."""
    as_root = os.geteuid() == 0
    names = ["bwrap", "prlimit", *(["setpriv"] if as_root else [])]
    found = {name: shutil.which(name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        packages = {"bwrap": "bubblewrap"}
        raise TaskError(
            f"model-written code runs in a sandbox only, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed (install "
            f"{' and '.join(dict.fromkeys(packages.get(m, 'util-linux') for m in missing))})"
        )
    return _make_tools(found["bwrap"] or "", found["prlimit"] or "", found.get("setpriv"))


@functools.cache
def _make_tools(bwrap: str, prlimit: str, setpriv: str | None) -> SandboxTools:
    drop: tuple[str, ...] = ()
    if setpriv is not None:
        user = f"--reuid={USER}", f"--regid={USER}", "--clear-groups"
        rights = "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"
        drop = (setpriv, *user, *rights, "--")
    python, folders = _interpreter(as_user=setpriv is None)
    tools = SandboxTools(
        drop=drop,
        bwrap=bwrap,
        prlimit=prlimit,
        python=python,
        options=_options(bwrap, folders),
    )
    _try_out(tools)
    return tools


def _interpreter(*, as_user: bool) -> tuple[str, tuple[str, ...]]:
    """An interpreter that the sandbox's user can read, and what it needs beside /usr.

    That is ours where it can, without the site packages of a virtual environment.
    """
    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python, library = prefix / "bin" / version, prefix / "lib"
    if as_user or all(_for_everybody(path) for path in (python, library / version)):
        if prefix.is_relative_to("/usr"):
            return str(python), ()
        if python.is_file() and library.is_dir():
            return str(python), (str(python), str(library))
    if not Path("/usr/bin/python3").exists():
        raise TaskError(
            f"model-written code runs as user {USER}, who can read neither {python} nor "
            "/usr/bin/python3 (install python3)"
        )
    return "/usr/bin/python3", ()


def _for_everybody(path: Path) -> bool:
    """Whether any user can reach and read a path."""
    path = path.resolve()
    return (
        path.exists()
        and bool(path.stat().st_mode & 0o004)
        and all(folder.stat().st_mode & 0o001 for folder in path.parents)
    )


def _options(bwrap: str, folders: Sequence[str]) -> tuple[str, ...]:
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    options += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    if "--disable-userns" in known:  # since 0.8
        options.append("--disable-userns")
    for name in ("/usr", *folders):
        options += ["--ro-bind", name, name]
    for name in ("/bin", "/lib", "/lib64"):  # links into /usr on most systems
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    if "--size" in known:  # since 0.7; a folder without a limit would be one without end
        options += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    else:
        options += ["--dir", "/tmp"]
    return (*options, "--chdir", "/tmp", "--remount-ro", "/")


def _try_out(tools: SandboxTools) -> None:
    """Raises TaskError unless a sandbox starts."""
    filter_fd = open_filter()
    try:
        done = subprocess.run(
            sandbox_command(tools, "print(1)", filter_fd=filter_fd, seconds=5, memory_mb=512),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=[filter_fd],
            cwd="/",
            env={},
        )
    finally:
        os.close(filter_fd)
    if done.stdout != "1\n":
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TaskError(
            f"model-written code runs in a sandbox only, and none starts here: {said} (it needs "
            "bubblewrap 0.5 or newer and user namespaces, which containers and some systems forbid)"
        )
