"""`make torch` chooses the build of torch: stand-ins for pip and uv note how they are called."""

import re
import subprocess
from pathlib import Path

import pytest

from infra.placement import count_gpus

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
if [ "$1" = config ]; then echo "$PIP_CONFIGURED"; exit; fi
echo "{name} $*" >> "{calls}"
"""
CPU = r"uv pip install .* -c constraints.txt --torch-backend cpu torch"
PIP = r"pip install --quiet -c constraints.txt torch"
UV = r"uv pip install (?!.*--torch-backend).* -c constraints.txt torch"  # PyTorch's own index
GIVEN = r".* --index-url https://b.example/cpu torch"
GPU, INDEX = "GPUS=/dev/nvidia0", "TORCH_INDEX=https://b.example/cpu"
A, C = "https://a.example/simple", "https://c.example/simple"
INDEXES = dict.fromkeys(("DEFAULT_INDEX", "INDEX_URL", "INDEX", "EXTRA_INDEX_URL"), C)
OF_UV = {f"UV_{name}": value for name, value in (INDEXES | {"FIND_LINKS": "/opt/wheels"}).items()}
# Words of make and variables -> the call, and a part of the line that is printed.
CASES = {
    "a machine without a GPU": ([], {}, CPU, "without CUDA"),
    "none by name": (["GPUS="], {}, CPU, "without CUDA"),
    "a GPU": ([GPU], {}, PIP, "with CUDA"),
    "an index of pip": ([], {"PIP_CONFIGURED": f"global.index-url='{A}'"}, PIP, "that pip is"),
    "links of pip": ([], {"PIP_CONFIGURED": ":env:.find-links='/opt'"}, PIP, "that pip is"),
    "an index that is given": (
        [INDEX, GPU],
        {"PIP_CONFIGURED": "global.index-url='x'"},
        GIVEN,
        "from TORCH_INDEX",
    ),
    **{f"{n} of uv": ([], {n: value}, UV, f"index of {n};") for n, value in OF_UV.items()},
    **{f"{n} and a GPU": ([GPU], {n: v}, UV, f"index of {n};") for n, v in OF_UV.items()},
    "an empty variable": ([GPU], {"UV_DEFAULT_INDEX": ""}, PIP, "with CUDA"),
    "pip and uv": ([], {**OF_UV, "PIP_CONFIGURED": "global.index-url='x'"}, PIP, "that pip is"),
    "given, and uv": ([INDEX], OF_UV, GIVEN, "from TORCH_INDEX"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_index_that_is_given_or_configured_decides_else_the_gpu(
    case: str, tmp_path: Path
) -> None:
    words, variables, call, part = CASES[case]
    if words == [] and call == CPU and count_gpus() > 0:
        pytest.skip("this machine has a GPU")
    (tmp_path / "bin").mkdir()
    for name in ("pip", "uv"):
        program = tmp_path / "bin" / name
        program.write_text(STAND_IN.format(name=name, calls=tmp_path / "calls"))
        program.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "torch", f"VENV={tmp_path}", *words],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIGURED": "", **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    (found,) = (tmp_path / "calls").read_text().splitlines()
    assert re.fullmatch(call, found), found
    (line,) = done.stdout.splitlines()
    assert line.startswith("torch ")
    assert part in line
    assert "TORCH_INDEX" in line
