"""How the comparison of training speeds is run, and when it counts as failed."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from bench.train import Case, Side, SideFailed

ROOT = Path(__file__).parents[3]
TINY = Case(
    name="d1", depth=1, device="cpu", precision="fp32", rows=2, accumulate=2,
    sequence_len=64, vocab_size=512, compile=False,
)  # fmt: skip
pytestmark = pytest.mark.torch
# A loop of a tenth of a second a step, most of it in what it calls "sleep".
LOOP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from train_gate import Gate
gate = Gate(synchronize=lambda: None, peak_bytes=lambda: 7, name="loop")
sleep = gate.wrap(time.sleep, "sleep")
for step in range(1000):
    print("this is no answer")
    sleep(0.1)
    if gate.take_save():
        print("saved", file=sys.stderr)
    gate.after_step()
"""


def measured(*seconds: float) -> list[dict[str, Any]]:
    least = {"steps": 2, "peak_bytes": 10**9, "sections": {}}
    return [{**least, "seconds": s, "cpu_seconds": 2 * s} for s in seconds]


@pytest.fixture
def loop(tmp_path: Path):
    (tmp_path / "loop.py").write_text(LOOP)
    side = Side([str(tmp_path / "loop.py"), str(ROOT / "bench")], tmp_path, eager=True)
    yield side
    side.close()


def test_a_loop_is_held_between_rounds_and_its_sections_and_one_save_are_reported(
    loop: Side, tmp_path: Path
) -> None:
    began = time.monotonic()
    first = loop.run(3)
    assert (first["steps"], first["peak_bytes"], first["sections"]) == (3, 7, {})
    assert 0.3 <= first["seconds"] <= time.monotonic() - began
    second = loop.run(2, "sections")
    split = second["sections"]
    assert split.keys() == {"sleep", "other"}
    assert split["sleep"] >= 0.2
    assert sum(split.values()) == pytest.approx(second["seconds"], rel=0.01)
    loop.run(3, "save")
    loop.run(2)
    assert (tmp_path / "log").read_text().count("saved") == 1


# As torch's compiler does: the reason, then advice and empty lines.
BROKEN = """
import sys
try:
    raise ValueError("no such model")
except ValueError as error:
    sys.exit(f"ValueError: {error}\\n\\nSet THIS=1 for more.\\n\\n")
"""


def test_a_side_that_breaks_says_how(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    side = Side([str(tmp_path / "broken.py")], tmp_path, eager=True)
    with pytest.raises(SideFailed, match=r"ended with 1:\n +ValueError: no such model"):
        side.wait_ready()
    side.close()
