"""`make s3`: its own server answers, or it says why none does."""

import http.server
import threading
from pathlib import Path

import pytest

from infra.containers.local_s3 import start_local_s3
from nanochat_core.errors import StoreError


def test_another_program_on_the_port_is_not_taken_for_the_server(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_port
        with (
            pytest.raises(StoreError, match=f"port {port} of 127.0.0.1 is taken") as error,
            start_local_s3(tmp_path / "data", port=port),
        ):
            pass
        other.shutdown()
    assert "PORT=" in str(error.value.hint)
