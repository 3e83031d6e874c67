"""The search of tests/campaigns/reliability/test_secrets.py finds secrets in files and headers."""

import base64
from pathlib import Path

import pytest

from tests.support.reliability.canaries import find_in_files, find_in_text


@pytest.mark.parametrize("text", ["a {} b", "postgresql://u:{}@h/d", '{{"token": "{}"}}'])
def test_a_canary_in_a_file_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * ((1 << 20) - 9) + text.format("the+secret/value"))
    (found,) = find_in_files(tmp_path, {"key": "the+secret/value"})
    assert found.startswith("key in log")


@pytest.mark.parametrize("user", ["u", "us", "use", "user"])
def test_a_canary_in_a_header_is_found(user: str) -> None:
    header = b"Basic " + base64.b64encode(f"{user}:the-secret-value".encode())
    assert find_in_text(header, {"auth": "the-secret-value"}) == ["auth"]
    assert find_in_text(header, {"auth": "another-secret"}) == []
