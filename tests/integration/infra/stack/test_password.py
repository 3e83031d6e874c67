"""The password of a home's own server: made once, for its owner, and read from no link."""

import re
import stat
from pathlib import Path

from infra.prefect.password import ensure_password, find_password, password_path


def test_a_password_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()

    password = ensure_password(tmp_path)

    assert re.fullmatch(r"nanochat:[\w-]{32}", password)
    assert ensure_password(tmp_path) == find_password(tmp_path) == password
    assert stat.S_IMODE(password_path(tmp_path).stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "elsewhere").write_text("nanochat:known-to-all\n")
    password_path(tmp_path).symlink_to(tmp_path / "elsewhere")

    assert find_password(tmp_path) is None
    ensure_password(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "nanochat:known-to-all\n"
