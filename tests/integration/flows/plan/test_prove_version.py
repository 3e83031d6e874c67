"""A proof of what another version of the code fingerprinted."""

import pytest

from nanochat_core.errors import ArtifactError
from tests.integration.flows.plan.test_prove import LAST_BIT, REFACTORED, TRAINS, make_bench
from tests.support.flows.fixtures import Toys


def test_an_artifact_that_another_version_fingerprinted_is_not_called_uncommitted(toys: Toys):
    scanner = toys.root / "flows/identity/fingerprint.py"
    scanner.parent.mkdir(parents=True)
    scanner.write_text("VERSION = 1\n")
    bench = make_bench(toys, TRAINS, trains=True, dirty=LAST_BIT)
    bench.source.write_text(REFACTORED)
    scanner.write_text("VERSION = 2\n")
    with pytest.raises(ArtifactError, match="was fingerprinted by another version") as caught:
        bench.prove()
    assert "without --prove" in (caught.value.hint or "")
    assert bench.said == []  # nothing was run
