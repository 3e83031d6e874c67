"""A Postgres of a test's own: a cluster in a temporary directory, run by an unprivileged user."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.infra.ports import quiet_port

PASSWORD = "never-on-a-command-line"
_PLACES = "/usr/lib/postgresql/*/bin"
_USERS = ("postgres", "nobody")  # Postgres refuses to run as root


@dataclass(frozen=True, kw_only=True)
class Postgres:
    """A running database server with the empty database `postgres`."""

    binaries: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        """Of the database, with the password."""
        return f"postgresql://prefect:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def prefect_url(self) -> str:
        """Of the database, as Prefect's server takes it."""
        return self.url.replace("://", "+asyncpg://")

    def select(self, query: str) -> str:
        """What the database answers, as text."""
        done = subprocess.run(
            [self.binaries / "psql", "--no-psqlrc", "-tA", "-c", query, self.url],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def dump(self) -> bytes:
        """All of the database as SQL."""
        return subprocess.run(
            [self.binaries / "pg_dump", "--dbname", self.url], check=True, capture_output=True
        ).stdout


@contextmanager
def running_postgres(password: str = PASSWORD) -> Generator[Postgres]:
    """Start one and stop it; skip the test where there is none."""
    if (binaries := find_binaries()) is None:
        pytest.skip("there is no Postgres here: apt-get install postgresql")
    directory = Path(tempfile.mkdtemp(prefix="nanochat-postgres-"))
    user = _user()
    data, word = directory / "data", directory / "password"
    word.write_text(password)
    if user is not None:
        for path in (directory, word):
            shutil.chown(path, user)
    port = quiet_port()

    def run(*command: str | Path) -> None:
        done = subprocess.run(
            command, user=user, cwd=directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {directory}"
    control = (binaries / "pg_ctl", "-D", data, "-w", "-l", directory / "log")
    try:
        run(
            *(binaries / "initdb", "-D", data, "-U", "prefect", "--pwfile", word),
            *("--auth", "scram-sha-256", "--no-sync"),
        )
        run(*control, "-o", options, "start")
        try:
            yield Postgres(binaries=binaries, port=port, password=password)
        finally:
            run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory)


def find_binaries() -> Path | None:
    """The directory of Postgres's programs."""
    found = sorted(Path("/").glob(f"{_PLACES.lstrip('/')}/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def _user() -> str | None:
    """Who runs it; None: we do."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in _USERS if name in names)
