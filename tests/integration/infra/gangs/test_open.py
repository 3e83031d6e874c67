"""The scheduler that a worker's environment names."""

from pathlib import Path

import pytest

from infra.gangs.open import open_gangs
from infra.gangs.slurm import Slurm
from nanochat_core.errors import ConfigError


def test_a_worker_has_the_scheduler_that_its_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANOCHAT_GANGS", raising=False)
    assert open_gangs(tmp_path) is None
    monkeypatch.setenv("NANOCHAT_GANGS", "slurm")
    assert isinstance(open_gangs(tmp_path), Slurm)


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd00:96::1", "https://[fd00:96::1]:443")],
)
def test_the_api_server_of_a_pods_cluster_may_have_an_address_of_ipv6(
    host: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.gangs.open.Kubernetes", lambda url, **_: url)
    monkeypatch.setenv("NANOCHAT_GANGS", "kubernetes")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert open_gangs(tmp_path) == url


@pytest.mark.parametrize("name", ["pbs", "kubernetes"])  # here is no pod
def test_another_one_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("NANOCHAT_GANGS", name)
    with pytest.raises(ConfigError, match=f"NANOCHAT_GANGS is '{name}'"):
        open_gangs(tmp_path)
