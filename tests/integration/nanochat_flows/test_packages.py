"""A script beside a folder with the name of a package of ours learns which one is in the way."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_flows.packages import PACKAGES, ROOT


@pytest.mark.parametrize("name", PACKAGES)
def test_the_client_names_a_folder_that_is_in_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nimport nanochat_flows.client\n"
    )
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: Python imports {tmp_path / name} in place of" in done.stderr
    assert "hint: rename it" in done.stderr
