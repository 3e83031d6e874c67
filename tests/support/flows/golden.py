"""Fingerprints of every stage of every profile, over code and inputs that never change.

What they pin is how identity is computed. When one of them changes, every artifact of that stage
that exists anywhere is rebuilt: do it knowingly, say so in the changelog (**Rebuilds: ...**), and
write the file again with

    python -m tests.support.flows.golden

Needs no package but ours, so that any Python can compute them.
"""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path

from flows.identity.fingerprint import Code, identify
from flows.profiles import PROFILES, open_profile
from flows.stages import STAGES
from nanochat_core.config import RunConfig

FILE = Path(__file__).with_name("golden_fingerprints.json")

_SHARED = '''"""What every stage reaches."""

from . import carried

RATES = {"low": 1e-3, "high": 0x10}


def rate(name: str, *, scale: float = 1.0) -> float:
    """A comment, a docstring and the layout do not count."""
    return RATES[name] * scale  # here
'''


def write_code(root: Path) -> Path:
    """A repository with an entry for each stage, a module they share, and a data file."""
    for stage in STAGES:
        path = root / f"{stage.entry.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"from nanochat_core.fixed import shared\n\nNAME = {stage.entry!r}\n"
            "WORDS = 'words.txt'\n\n\ndef run(job):\n    return {'rate': shared.rate(NAME)}\n"
        )
        (path.parent / "words.txt").write_text("one\ntwo\n")
    fixed = root / "nanochat_core" / "fixed"
    fixed.mkdir(parents=True)
    (fixed / "shared.py").write_text(_SHARED)
    (fixed / "carried.py").write_text("LIMIT = 3\n")
    return root


def compute(code: Code) -> dict[str, dict[str, str]]:
    """Profile -> stage -> fingerprint."""
    return {name: _of_run(_anywhere(open_profile(name).run), code) for name in PROFILES}


def _of_run(run: RunConfig, code: Code) -> dict[str, str]:
    digests = {stage.name: hashlib.sha256(stage.name.encode()).hexdigest() for stage in STAGES}
    found: dict[str, str] = {}
    for stage in STAGES:
        inputs = {source.name: digests[source.name] for source in stage.inputs}
        found[stage.name] = identify(stage, run, inputs, code=code, records=inputs).fingerprint
    return found


def _anywhere(run: RunConfig) -> RunConfig:
    """Without what a profile takes from the machine it is opened on: versions of packages."""
    snapshot = ("package==1.0",) if run.shards.snapshot else ()
    return dataclasses.replace(run, shards=dataclasses.replace(run.shards, snapshot=snapshot))


def to_json() -> str:
    """All of it, as the file has it."""
    with tempfile.TemporaryDirectory() as directory:
        return json.dumps(compute(Code(write_code(Path(directory)))), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_json())
