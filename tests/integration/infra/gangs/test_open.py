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
def test_a_pod_uses_its_own_cluster_which_may_have_an_address_of_ipv6(
    host: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "nanochat\n")):
        (tmp_path / name).write_text(text)
    own = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{own}.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{own}.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr("infra.gangs.kubernetes.NAMESPACE", tmp_path / "namespace")
    monkeypatch.setattr("kubernetes.client.ApiClient", lambda found: found.host)
    monkeypatch.setattr("infra.gangs.kubernetes.Kubernetes", lambda *found, **_: found)
    monkeypatch.setenv("NANOCHAT_GANGS", "kubernetes")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert open_gangs(tmp_path) == (url, "nanochat")


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("pbs", "NANOCHAT_GANGS is 'pbs'", "slurm or kubernetes"),
        ("kubernetes", "finds no cluster", "name a kubeconfig in KUBECONFIG"),
    ],
)
def test_a_scheduler_that_is_not_there_is_refused(
    name: str, error: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("NANOCHAT_GANGS", name)
    with pytest.raises(ConfigError, match=error) as caught:
        open_gangs(tmp_path)
    assert hint in (caught.value.hint or "")


def test_a_missing_client_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_GANGS", "kubernetes")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package kubernetes") as caught:
        open_gangs(tmp_path)
    assert caught.value.hint == "pip install 'nanochat-flows[kubernetes]'"
