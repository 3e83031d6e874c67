"""Checks of this machine for `nanochat doctor`: one function per fact, each failure with a remedy.

`fail` means that a run cannot work; `warn` that it works, but slower or with less protection.
"""

import contextlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from packaging.requirements import Requirement

from infra.placement import count_gpus, count_threads, default_sinks, missing_packages
from infra.prefect.access import ServerError, check_answers
from infra.prefect.server import adopt_password, find_server, find_supervisor, shared_server
from infra.storage.open import open_store
from infra.storage.s3.probe import Finding, State, probe
from nanochat_core.engine.native.build import unable_here
from nanochat_core.engine.runners import measured
from nanochat_core.errors import NanochatError, reason_of
from nanochat_core.runtime.hardware.memory import memory_left
from tasks.base import TaskError
from tasks.sandbox.run import protections

GIB = 1 << 30
DISK_NEEDED = 1 * GIB  # what `tiny` writes, with room to spare
DISK_WANTED = 20 * GIB  # d12: shards, tokens, rows and checkpoints
MEMORY_NEEDED = 2 * GIB
MEMORY_WANTED = 6 * GIB
SECONDS_FOR_TORCH = 120  # a cold disk takes half a minute

_INSTALL = "install nanochat-flows again, in an environment of its own; in a checkout: make setup"

# Run in a process of its own: a torch that crashes on import is a result and does not end `doctor`.
# The best of 8 products: the first ones load kernels, and other programs disturb the rest.
_ASK_TORCH = """
import json, time, torch

def seconds(dtype):
    a = torch.randn(512, 512).to(dtype)
    best = 1e9
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best

gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "bf16_speedup": seconds(torch.float32) / seconds(torch.bfloat16),
    "gpus": gpus,
    "gpu_bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
}))
"""


def _check(state: State, name: str, found: str, remedy: str | None = None) -> Finding:
    return Finding(name=name, state=state, found=found, remedy=remedy)


_ok, _warn, _fail = (partial(_check, state) for state in get_args(State))


def examine(home: Path, store: str) -> Iterator[Finding]:
    """Yield the result of every check, in the order in which their failures matter."""
    yield _ok("python", platform.python_version())  # pip refuses to install us for an older one
    try:
        yield from check_packages(importlib.metadata.requires("nanochat-flows") or ())
    except importlib.metadata.PackageNotFoundError:
        yield _fail("packages", "nanochat-flows is not installed here", _INSTALL)
    torch = ask_torch(sys.executable)
    yield from check_torch(torch)
    yield check_gpu(torch, devices=count_gpus())
    yield check_threads(count_threads())
    yield check_memory(memory_left())
    yield check_home(home)
    yield from try_store(store)
    yield check_server(home, shared=shared_server(home))
    yield check_workers(home)
    yield check_kernels(unable_here())
    yield from list_speeds(measured.recorded())
    yield check_trackers(default_sinks())
    yield check_sandbox()


def check_packages(
    requirements: Iterable[str], *, version_of: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Finding]:
    """Check the packages of which newer versions fail at run time: those with an upper bound."""
    for requirement in map(Requirement, requirements):
        if not requirement.marker and "<" in str(requirement.specifier):
            name, version, why = requirement.name, "", "not installed"
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = version_of(name)
                why = f"{version}, expected {requirement.specifier}"
            is_good = version and version in requirement.specifier
            yield _ok(name, version) if is_good else _fail(name, why, _INSTALL)


def ask_torch(python: str) -> dict[str, Any] | str:
    """Return torch's version, devices and bf16 speedup, or the error as text if it cannot run."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=SECONDS_FOR_TORCH
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS_FOR_TORCH} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()  # the last line of a traceback is the exception
        return lines[-1] if lines else f"exit code {done.returncode}"
    # Only the last line: libraries may print to stdout while they load.
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_torch(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Check that torch imports, and that bf16 is faster than fp32 on this CPU."""
    if isinstance(torch, str):
        yield _fail("torch", torch, _INSTALL)
        return
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    yield _ok("torch", f"{torch['version']} ({cuda})")
    # A CPU without bf16 instructions converts to fp32 and back, which is slower than fp32 alone.
    speedup = torch["bf16_speedup"]
    times = f"{speedup:.1f} times as fast" if speedup > 1 else f"{1 / speedup:.1f} times as slow"
    found = f"matrix products run {times} as fp32 on this CPU"
    remedy = (
        "expect profiles that train in bf16 to be slow here; "
        "`--set numerics.precision=fp32` is another model, and faster"
    )
    is_slow = not torch["gpu_bf16"] and speedup <= 1
    yield _warn("bf16", found, remedy) if is_slow else _ok("bf16", found)


def check_gpu(torch: dict[str, Any] | str, *, devices: int) -> Finding:
    """Check that torch can use all `devices` GPUs of this machine."""
    names: list[str] = [] if isinstance(torch, str) else torch["gpus"]
    if len(names) < devices:
        return _fail(
            "gpu",
            f"{devices} in this machine, torch can use {len(names)}",
            "install a torch with CUDA and a driver that fits it, or run with --gpus 0",
        )
    # No GPU is fine; GPUs that torch cannot use are a failure, since runs would ask for them.
    kinds = ", ".join(f"{names.count(name)}x {name}" for name in sorted(set(names)))
    return _ok("gpu", kinds or "none: models train on the CPU (fine for tiny)")


def check_threads(threads: int) -> Finding:
    """Check that there are at least 2 threads."""
    remedy = "tiny is sized for 2 cores: expect it to take twice as long"
    return _warn("cpu", "1 thread", remedy) if threads < 2 else _ok("cpu", f"{threads} threads")


def check_memory(available: int) -> Finding:
    """Check that enough memory is free; available: bytes."""
    found = f"{available / GIB:.1f} GiB available"
    remedy = f"close other programs: tiny wants {MEMORY_WANTED // GIB} GiB"
    return _room("memory", available, MEMORY_NEEDED, MEMORY_WANTED, found, remedy)


def _room(name: str, free: int, needed: int, wanted: int, found: str, remedy: str) -> Finding:
    if free >= wanted:
        return _ok(name, found)
    return _check("fail" if free < needed else "warn", name, found, remedy)


def check_home(home: Path, *, free_of: Callable[[Path], int] | None = None) -> Finding:
    """Check that the home directory can be created and written, and has free space."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        # Write for real: permission bits say nothing of read-only mounts, quotas and ACLs.
        probe = home / f".doctor-{uuid.uuid4().hex}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return _fail(
            "disk",
            f"{home}: {reason_of(error)}",
            "give a directory you may write to with --home or NANOCHAT_HOME",
        )
    free = free_of(home) if free_of else shutil.disk_usage(home).free
    found = f"{free / GIB:.1f} GiB free in {home}"
    remedy = (
        f"free some space: tiny needs {DISK_NEEDED // GIB} GiB, "
        f"d12 and larger {DISK_WANTED // GIB} GiB or more"
    )
    return _room("disk", free, DISK_NEEDED, DISK_WANTED, found, remedy)


def try_store(url: str) -> Iterator[Finding]:
    """Yield a result for every guarantee needed of a store, each tried out in it."""
    try:
        yield from probe(open_store(url))
    except NanochatError as error:
        yield _fail("store", str(error), error.hint)


def check_kernels(why_not: str | None) -> Finding:
    """Check that the compiled CPU kernels of the engine can be built here."""
    if why_not is None:
        return _ok("kernels", "compiled on first use")
    remedy = "install g++" if "compiler" in why_not else "none: torch answers instead, more slowly"
    return _warn("kernels", why_not, remedy)


def list_speeds(found: Iterable[tuple[measured.Case, measured.Seconds]]) -> Iterator[Finding]:
    """Yield what precision "auto" takes on this CPU, for each measurement in the user's cache."""
    each = [(case, seconds, measured.fastest(seconds)) for case, seconds in found]
    texts = [f"{best} for {case}: {measured.describe(s, best)}" for case, s, best in each]
    for text in texts or ["not measured yet; `nanochat chat` and `serve` do it in 0.1 s"]:
        yield _ok("answers", text)


def check_trackers(names: Sequence[str]) -> Finding:
    """Check that the packages of the trackers in NANOCHAT_SINKS are installed."""
    if missing := missing_packages(names):
        return _warn("trackers", *missing[0])
    return _ok("trackers", ", ".join(names) or "none; NANOCHAT_SINKS names them")


def check_sandbox() -> Finding:
    """Check that programs written by a model (the task humaneval) can run in bubblewrap."""
    remedy = "install bubblewrap and allow user namespaces; only the task humaneval needs it"
    try:
        found = protections()
    except TaskError as error:
        return _warn("sandbox", str(error), remedy)
    if found.kind == "bubblewrap":
        return _ok("sandbox", found.kind)
    # The other kinds protect less; `why` says what prevents bubblewrap.
    return _warn("sandbox", f"{found.kind} ({'; '.join(found.why)})", remedy)


def check_server(home: Path, *, shared: str | None) -> Finding:
    """Check that the shared Prefect server answers. None means a local one, started on demand."""
    server = find_server(home)
    if shared is None and server is None:
        return _ok("server", "not running; `nanochat run` starts one")
    adopt_password(home)
    api_url = shared or (server.api_url if server else "")
    try:
        check_answers(api_url)
    except ServerError as error:
        return _fail("server", str(error), error.hint)
    return _ok("server", f"{api_url} answers")


def check_workers(home: Path) -> Finding:
    """Check the workers that execute runs started in Prefect's pages on this machine."""
    supervisor = find_supervisor(home)
    none = "not running; `nanochat up` starts them"
    return _ok("workers", f"run by process {supervisor.pid}" if supervisor else none)
