"""A Postgres server of the system's package, for tests: on 127.0.0.1, with a password."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from infra.containers.local_s3 import free_port

_DEBIAN = Path("/usr/lib/postgresql")


def find_programs() -> Path | None:
    """The directory of initdb, postgres and pg_dump; None when there is no Postgres."""
    for found in (*sorted(_DEBIAN.glob("*/bin"), reverse=True), shutil.which("initdb")):
        if found is not None:
            directory = Path(found) if Path(found).is_dir() else Path(found).resolve().parent
            if (directory / "initdb").exists():
                return directory
    return None


@contextlib.contextmanager
def postgres(*, password: str) -> Iterator[str]:
    """A running server with an empty database; gives its URL, which has the password in it.

    Its directory is nobody else's, and not below one of pytest's, which its user may not enter.
    """
    with tempfile.TemporaryDirectory() as name, _running(Path(name), password) as url:
        yield url


@contextlib.contextmanager
def _running(directory: Path, password: str) -> Iterator[str]:
    programs = find_programs()
    assert programs is not None
    owner = _owner()
    secret = directory / "password"
    secret.write_text(password)
    if owner is not None:
        for path in (directory, secret):
            shutil.chown(path, owner)
    data, port = directory / "data", free_port()
    subprocess.run(
        [
            *(programs / "initdb", "--pgdata", data, "--username", "prefect"),
            *("--pwfile", secret, "--auth", "scram-sha-256", "--no-sync"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=directory,
        user=owner,
    )
    secret.unlink()
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(programs / "postgres", "-D", data, "-p", str(port), "-k", directory),
                *("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
            ],
            stdout=log,
            stderr=log,
            cwd=directory,
            user=owner,
        )
    try:
        _wait(programs, port, server)
        yield f"postgresql://prefect:{password}@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(30)


def dump(url: str) -> bytes:
    """All of the database as SQL."""
    programs = find_programs()
    assert programs is not None
    return subprocess.run(
        [programs / "pg_dump", "--dbname", url], check=True, capture_output=True
    ).stdout


def _owner() -> str | None:
    """Who runs it: Postgres refuses to be root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


def _wait(programs: Path, port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, check=False).returncode:
        assert server.poll() is None, "Postgres does not start"
        assert time.monotonic() < deadline, "Postgres does not answer"
        time.sleep(0.1)
