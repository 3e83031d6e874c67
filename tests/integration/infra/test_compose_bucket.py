"""The command of compose.yaml's service `bucket`, against the server that the stack has."""

import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.infra.deployed import INFRA
from tests.support.infra.storage.s3_server import start_s3


def test_the_stack_can_be_started_again_when_its_bucket_is_there(tmp_path: Path) -> None:
    services = yaml.safe_load((INFRA / "containers" / "compose.yaml").read_text())["services"]
    python, *arguments, code = services["bucket"]["command"]
    assert (python, arguments) == ("python", ["-c"])
    port = None
    for _ in range(2):  # started again, the server knows no region of a bucket with objects
        server = start_s3(tmp_path / "server", port)
        port = server.port
        try:
            here = code.replace("http://s3:4566", server.endpoint)
            subprocess.run([sys.executable, "-c", here], check=True, timeout=120)
            client = server.client("s3")
            found = client.list_buckets()["Buckets"]
            client.put_object(Bucket="nanochat", Key="key", Body=b"value")
        finally:
            server.kill()
        assert [bucket["Name"] for bucket in found] == ["nanochat"]
