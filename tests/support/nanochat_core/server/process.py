"""A server in a process of its own, with the engine that has no model: its clients share
neither its memory nor its time.

    python -m tests.support.nanochat_core.server.process DIR SLOTS WAITING MAKER
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from nanochat_core.server.config import ServerConfig
from nanochat_core.server.connection_timeouts import TimedProtocol
from nanochat_core.server.launch import Engines, trusted_hosts
from nanochat_core.server.serve import serve
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.live import FAKE, PATIENCE, wait_until

RECEIVE_SECONDS = 2.0


@dataclass(frozen=True)
class Apart:
    port: int
    pid: int

    def get(self, path: str) -> dict:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE).json()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        health = self.get("/health")
        return health["running"] + health["waiting"] == 0

    @property
    def memory(self) -> int:
        return psutil.Process(self.pid).memory_info().rss


@contextlib.contextmanager
def serving_apart(*, slots: int = 16, max_waiting: int = 64, maker: str = FAKE) -> Iterator[Apart]:
    """A server as long as the block lasts."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer").mkdir()
        TOKENIZER.save(Path(directory) / "tokenizer")
        (Path(directory) / "config.json").touch()
        log = Path(directory) / "log"
        command = [sys.executable, "-m", __name__, directory, str(slots), str(max_waiting)]
        command.append(maker)
        with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
            try:
                wait_until(lambda: "answers:" in log.read_text() or process.poll() is not None)
                start = r"chat at http://127.0.0.1:(\d+)\nanswers: .+\n"
                found = re.fullmatch(start, log.read_text())
                time.sleep(0.5)
                assert found is not None, log.read_text()
                yield Apart(int(found[1]), process.pid)
                assert process.poll() is None
                written = log.read_text()[found.end() :]
                assert not written, written[-6000:]
            finally:
                process.kill()


if __name__ == "__main__":
    TimedProtocol.receive_seconds = RECEIVE_SECONDS
    serve(
        Path(sys.argv[1]),
        name=Path(sys.argv[1]).name,
        host="127.0.0.1",
        port=0,
        engines=Engines(device="cpu", maker=sys.argv[4], num_slots=int(sys.argv[2])),
        rules=ServerConfig(
            log="none", max_waiting=int(sys.argv[3]), hosts=trusted_hosts("127.0.0.1", [])
        ),
    )
