"""What `nanochat up` warns of when a shared server lacks our deployments.

The server here is a small one that knows some paths of Prefect's API.
"""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from flows.cli.machine.up import _warn_of_missing  # pyright: ignore[reportPrivateUsage]
from tests.support.serving import QuietHandler, serving

FLOW, GPU = ("/api/deployments/name/nanochat/nanochat", "/api/deployments/name/one-stage/gpu")


class Known(QuietHandler):
    """Knows the paths that its class is given."""

    paths: ClassVar[set[str]] = set()
    otherwise = 404

    def do_GET(self) -> None:
        self.reply(200 if self.path in self.paths else self.otherwise, b"{}")


@pytest.fixture
def api_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    monkeypatch.setattr(Known, "paths", {FLOW, GPU})
    with serving(Known) as port:
        yield f"http://127.0.0.1:{port}/api"


def test_what_a_server_lacks_is_one_line_with_the_command(
    api_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(*pools: str) -> str:
        _warn_of_missing(api_url, pools)
        return capsys.readouterr().err

    assert warning("cpu", "gpu") == ""
    assert warning("gpu", "h100") == (
        f"warning: {api_url} lacks the deployments one-stage/h100; register them with "
        "`nanochat up --register --pool h100`\n"
    )
    monkeypatch.setattr(Known, "paths", {GPU})
    assert (
        "lacks the deployments nanochat/nanochat; register them with `nanochat up --register`"
        in (warning("cpu", "gpu"))
    )
    for code in (401, 500):  # it says nothing of what it has
        monkeypatch.setattr(Known, "otherwise", code)
        assert warning("cpu") == ""


def test_a_local_server_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_missing(None, ("cpu", "gpu"))

    assert capsys.readouterr().err == ""
