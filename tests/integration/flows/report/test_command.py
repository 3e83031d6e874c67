"""The code that a report runs."""

import subprocess
import sys

from flows.identity.fingerprint import REPOSITORY
from tests.support.flows.reported import make_inputs


def test_the_reports_fingerprint_sees_all_the_code_that_runs(tmp_path):
    """A process of its own: others have loaded what they need."""
    make_inputs(tmp_path)
    script = f"""
from pathlib import Path
from flows.report import card as report_card, inputs as report_inputs
from flows.identity.fingerprint import REPOSITORY, Code, Identity
from flows.stages import REPORT
from nanochat_core.runtime.code_record import read_record, record_code
record_code(Path({str(tmp_path)!r}, "code"))
inputs = {{s.name: Path({str(tmp_path)!r}, s.name, "files") for s in REPORT.inputs}}
card, _ = report_card.make_card(report_inputs.open_artifacts(inputs))
assert card.lead[-1] == "Made by `nanochat run tiny`"
card.html, card.markdown
loaded = [n for n, text in read_record(Path({str(tmp_path)!r}, "code")) if text.strip()]
from flows.building.code_check import leaked_modules
code = dict(Code(REPOSITORY).closure(REPORT.entry))
identity = Identity(stage="report", fingerprint="0" * 64, preimage={{"code": code}})
print(leaked_modules(identity, loaded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
