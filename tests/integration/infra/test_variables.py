"""Every environment variable that a file for another program names is read by something."""

import functools
from collections.abc import Sequence

import pytest
import yaml

from tests.support.infra.deployed import INFRA, named, ours

FOLDERS = ("containers", "kubernetes", "skypilot", "slurm", "systemd")
FILES = [path for name in FOLDERS for path in sorted((INFRA / name).rglob("*")) if path.is_file()]
# Of botocore, which finds them by itself.
OF_AWS = {"AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_SECRET_ACCESS_KEY"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_variable_that_a_file_names_is_read_by_something(folder: str) -> None:
    files = [p for p in FILES if (INFRA / folder) in p.parents and p.suffix not in (".py", ".pyc")]
    found = named("".join(path.read_text() for path in files))
    assert "NANOCHAT_STORE" in found
    # Kubernetes has names and keys of secrets beside variables.
    assert unknown([name for name in found if not name.endswith(("_NAME", "_KEY"))]) == []


def test_every_variable_of_skypilot_is_read_by_something() -> None:
    _, *tasks = yaml.safe_load_all((INFRA / "skypilot" / "speedrun.yaml").read_text())
    names = {name for task in tasks for name in (*task["envs"], *task["secrets"])}
    assert unknown(sorted(names - {"PROFILE"})) == []


def test_a_variable_with_a_slip_is_found() -> None:
    slips = ["NANOCHAT_STOER", "PREFECT_API_ULR", "AWS_KEY"]
    assert unknown(slips) == slips


def unknown(variables: Sequence[str]) -> list[str]:
    """Those that neither our code nor a program that we use reads."""
    return [name for name in variables if not _is_read(name)]


def _is_read(name: str) -> bool:
    if name.startswith("NANOCHAT_"):
        return name in ours()
    if name.startswith("PREFECT_INTEGRATIONS_KUBERNETES_"):
        return True  # of a package that is not installed here
    if name.startswith("PREFECT_"):
        return name in _settings_of_prefect()
    return name in OF_AWS


@functools.cache
def _settings_of_prefect() -> frozenset[str]:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    return frozenset(_get_settings_fields(Settings))
