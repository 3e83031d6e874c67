"""A local S3-compatible server for trials and tests of object storage: `make s3`.

It is MiniStack from the development packages, one process with known keys, which only this machine
can reach. A bucket is created, and the shell variables that select it are printed.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

from infra.launch.rendezvous import find_port
from nanochat_core.errors import NanochatError, StoreError

BUCKET = "nanochat"
PORT = 4566
_SECONDS_TO_START = 60.0


def client_environment(endpoint: str) -> dict[str, str]:
    """Return the environment variables with which a process uses the server."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextlib.contextmanager
def start_local_s3(data: Path, *, port: int) -> Generator[str]:
    """Run the server until the block ends, with objects and log under `data`; yield its address.

    Port 0: any port. Raises StoreError if it does not come up.
    """
    port = port or find_port()
    _check_free(port)
    data.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "ministack")]
    if not Path(command[0]).exists():
        raise StoreError("ministack is not installed", hint="run `make setup`")
    with (data / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=server_environment(data, port),
            cwd=data,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops it
        )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_for(endpoint, process)
        yield endpoint
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def server_environment(data: Path, port: int) -> dict[str, str]:
    """Return the server's settings, and none of the caller's own."""
    ours = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return ours | {
        "HOME": str(data),
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",
        "AUTH": "true",  # an unknown key is refused, as by a real store
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(data / "objects"),
        "SERVICES": "s3,iam",
        # Its IoT endpoint would listen on all addresses of the machine.
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "LOG_LEVEL": "WARNING",
    }


def _check_free(port: int) -> None:
    """Raise StoreError if a program listens on the port: its answer would pass for the server's."""
    with socket.socket() as probe:
        # Or a server that has ended is in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StoreError(
                f"port {port} of 127.0.0.1 is taken", hint=f"another one: make s3 PORT={port + 1}"
            ) from error


def make_bucket(endpoint: str) -> None:
    """Create the bucket; on this server creating it again does nothing."""
    from infra.storage.s3.bucket import Bucket  # loads botocore
    from infra.storage.s3.settings import read_settings

    os.environ.update(client_environment(endpoint))
    Bucket(BUCKET, prefix="", settings=read_settings({})).create()


def _wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StoreError(
                f"the server at {endpoint} ended with exit code {process.returncode}",
                hint="perhaps its port is taken: make s3 PORT=4567",
            )
        try:
            urllib.request.urlopen(endpoint, timeout=1)
        except urllib.error.HTTPError:
            return  # an HTTP error is an answer too
        except OSError:
            time.sleep(0.1)
            continue
        return
    raise StoreError(f"no answer from {endpoint} within {_SECONDS_TO_START:.0f} s")


def main() -> int:
    """Start the server, create the bucket, print how to use it, and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description="A local S3-compatible server, until Ctrl-C.")
    parser.add_argument("--data", type=Path, default=Path.home() / ".nanochat-flows" / "s3")
    parser.add_argument("--port", type=int, default=PORT)
    options = parser.parse_args()
    # Like Ctrl-C: by default SIGTERM would end this process without stopping the server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with start_local_s3(options.data, port=options.port) as endpoint:
            make_bucket(endpoint)
            print(f"S3-compatible server at {endpoint}, objects in {options.data}")
            print("Ctrl-C stops it; what was stored stays. In another terminal:\n")
            for name, value in client_environment(endpoint).items():
                print(f"export {name}={value}")
            print(f"export NANOCHAT_STORE=s3://{BUCKET}/demo\n", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    except NanochatError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
