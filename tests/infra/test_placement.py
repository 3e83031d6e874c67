"""What the environment says of this machine, and what is refused of it."""

import pytest

from infra.placement import default_cache_limit
from nanochat_core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, 100 * 10**9), ("", 100 * 10**9), ("2.5", 2_500_000_000), ("0", 0)],
)
def test_the_limit_of_the_cache_is_a_hundred_gigabytes_or_what_one_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None, limit: int
):
    if given is None:
        monkeypatch.delenv("NANOCHAT_CACHE_GB", raising=False)
    else:
        monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    assert default_cache_limit() == limit


@pytest.mark.parametrize("given", ["much", "-1", "nan", "inf"])
def test_what_is_no_limit_is_refused(monkeypatch: pytest.MonkeyPatch, given: str):
    monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    with pytest.raises(ConfigError, match=f"NANOCHAT_CACHE_GB is '{given}'"):
        default_cache_limit()
