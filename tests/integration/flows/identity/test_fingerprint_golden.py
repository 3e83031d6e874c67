"""Identity is computed the same way everywhere, and tomorrow."""

import json
import subprocess

import pytest

from flows.identity.fingerprint import REPOSITORY, Code
from flows.stages import STAGES
from tests.support.flows import golden
from tests.support.pythons import PYTHONS

# With the root of the repository: its closures, and the golden fingerprints.
SCAN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from flows.identity.fingerprint import Code
from flows.stages import STAGES
from tests.support.flows import golden
code = Code(Path(sys.argv[1]))
closures = {stage.name: code.closure(stage.entry) for stage in STAGES}
print(json.dumps({"closures": closures, "golden": json.loads(golden.to_json())}))
"""


def test_the_way_fingerprints_are_computed_is_pinned():
    """If this fails, see tests/support/flows/golden.py before you do anything."""
    assert json.loads(golden.to_json()) == json.loads(golden.FILE.read_text())


@pytest.mark.skipif(not PYTHONS, reason="no other Python from 3.11 on, on PATH or under pyenv")
@pytest.mark.parametrize("version", PYTHONS)
def test_identity_is_the_same_on_another_python_without_any_package(version):
    command = [str(PYTHONS[version]), "-I", "-S", "-c", SCAN, str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    code = Code(REPOSITORY)
    assert found["closures"] == {stage.name: code.closure(stage.entry) for stage in STAGES}
    assert found["golden"] == json.loads(golden.FILE.read_text())
