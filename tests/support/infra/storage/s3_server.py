"""A real S3 server (MiniStack) on this machine, for tests and for trials (`make s3`).

It checks checksums, conditions and the access key, and keeps what was put when it is killed. The
secret of its one root key is not checked: `add_user` makes keys whose signatures, clocks and
permissions are. It forgets unfinished multipart uploads when it stops.

    python -m tests.support.infra.storage.s3_server DIRECTORY PORT    until Ctrl-C
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_core.worker import die_with_parent
from tests.support.infra.ports import quiet_port

READY_WITHIN = 120  # seconds; it takes 0.3 on an idle machine
KEY, SECRET, REGION = "test", "test", "us-east-1"


@dataclass
class S3Server:
    """A server and what a client must have in its environment to reach it."""

    endpoint: str
    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        """Where it listens; `start_s3` with the same directory and port starts it again."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """Variables for this process or for a child; the developer's own settings are masked."""
        return client_environment(self.endpoint)

    def make_bucket(self, name: str) -> None:
        """A bucket; nothing happens when it is there."""
        client = self.client("s3")
        if name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)

    def add_user(self, name: str, *, allow: tuple[str, ...] = ("s3:*",)) -> dict[str, str]:
        """The environment of another user with the actions given, whose signature is checked."""
        name = f"{name}-{uuid.uuid4().hex[:8]}"
        iam = self.client("iam")
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(allow), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return self.environment | {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }

    def client(self, service: str) -> Any:
        """Botocore's own client as the root user: what is not our code sees the same store."""
        return _client(service, self.endpoint)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.process.kill()
        self.process.wait()


@functools.cache  # to make one costs 0.2 s of CPU
def _client(service: str, endpoint: str) -> Any:
    import botocore.session

    return botocore.session.Session().create_client(
        service,
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
    )


def client_environment(endpoint: str) -> dict[str, str]:
    """What a client needs for a server at `endpoint`, and nothing of the developer's own."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def server_environment(directory: Path, port: int) -> dict[str, str]:
    """The server's settings, and none of the caller's own."""
    ours = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return ours | {
        "HOME": str(directory),
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "AUTH": "true",  # an unknown key is refused, as by a real store
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(directory / "objects"),
        "SERVICES": "s3,iam",
        # Its IoT endpoint would listen on all addresses of the machine.
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "LOG_LEVEL": "WARNING",
    }


def start_s3(directory: Path, port: int | None = None) -> S3Server:
    """Start a server that keeps its objects in `directory`, and wait until it answers.

    Started again with the same directory and port it has the same objects. It ends with the thread
    that starts it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    port = port or quiet_port()
    with log.open("ab") as file:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "ministack"],
            env=server_environment(directory, port),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=functools.partial(die_with_parent, signal.SIGKILL),
        )
    server = S3Server(endpoint=f"http://127.0.0.1:{port}", directory=directory, process=process)
    deadline = time.monotonic() + READY_WITHIN
    while not _answers(server.endpoint):
        if process.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise RuntimeError(f"the S3 server does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
    return server


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/_ministack/health", timeout=2):
            return True
    except OSError as error:
        return hasattr(error, "code")  # an error of HTTP: a server listens


def main() -> None:
    """Run a server until Ctrl-C, and print the variables that select its bucket."""
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as probe:  # another program's answer would pass for the server's
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            sys.exit(f"port {port} is taken; another one: make s3 PORT={port + 1}")
    server = start_s3(directory, port)
    server.make_bucket("nanochat")
    lines = [f"S3-compatible server at {server.endpoint}, objects in {directory}"]
    lines += ["Ctrl-C stops it; what was stored stays. In another terminal:", ""]
    lines += [f"export {k}={v}" for k, v in server.environment.items() if v != os.devnull]
    lines += ["export NANOCHAT_STORE=s3://nanochat/demo", ""]
    sys.stdout.write("\n".join(lines))
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    server.kill()


if __name__ == "__main__":
    main()
