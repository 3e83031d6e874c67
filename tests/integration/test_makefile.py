"""`make torch` chooses the build of torch: stand-ins for pip and uv note how they are called."""

import subprocess
from pathlib import Path

import pytest

from infra.placement import count_gpus

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
if [ "$1" = config ]; then echo "$PIP_CONFIGURED"; exit; fi
echo "{name} $*" >> "{calls}"
"""


def make_torch(
    directory: Path, *words: str, configured: str = "", **variables: str
) -> tuple[list[str], str]:
    """What `make torch` runs and prints, given what pip is configured with and variables for uv."""
    (directory / "bin").mkdir()
    for name in ("pip", "uv"):
        program = directory / "bin" / name
        program.write_text(STAND_IN.format(name=name, calls=directory / "calls"))
        program.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "torch", f"VENV={directory}", *words],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIGURED": configured} | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    return (directory / "calls").read_text().splitlines(), done.stdout


def calls(directory: Path, *words: str, configured: str = "", **variables: str) -> list[str]:
    """What `make torch` runs."""
    return make_torch(directory, *words, configured=configured, **variables)[0]


@pytest.mark.skipif(count_gpus() > 0, reason="this machine has a GPU")
def test_without_a_gpu_the_cpu_build_is_installed(tmp_path: Path) -> None:
    (call,) = calls(tmp_path)
    assert call.startswith("uv pip install ")
    assert call.endswith(" -c constraints.txt --torch-backend cpu torch")


def test_with_a_gpu_pip_installs_its_usual_build(tmp_path: Path) -> None:
    assert calls(tmp_path, "GPUS=/dev/nvidia0") == ["pip install --quiet -c constraints.txt torch"]


@pytest.mark.parametrize(
    "setting", ["global.index-url='https://a.example/simple'", ":env:.find-links='/opt/wheels'"]
)
def test_an_index_that_pip_is_configured_with_wins(setting: str, tmp_path: Path) -> None:
    found = calls(tmp_path, configured=setting)
    assert found == ["pip install --quiet -c constraints.txt torch"]


def test_an_index_that_is_given_wins_over_all(tmp_path: Path) -> None:
    index = "TORCH_INDEX=https://b.example/cpu"
    (call,) = calls(tmp_path, index, "GPUS=/dev/nvidia0", configured="global.index-url='x'")
    assert "--index-url https://b.example/cpu torch" in call


UV = {
    "UV_DEFAULT_INDEX": "https://c.example/simple",
    "UV_INDEX_URL": "https://c.example/simple",
    "UV_INDEX": "https://c.example/simple",
    "UV_EXTRA_INDEX_URL": "https://c.example/simple",
    "UV_FIND_LINKS": "/opt/wheels",
}


@pytest.mark.parametrize("variable", UV)
@pytest.mark.parametrize("words", [(), ("GPUS=/dev/nvidia0",)])
def test_an_index_that_uv_is_configured_with_wins(
    variable: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (call,) = calls(tmp_path, *words, **{variable: UV[variable]})
    assert call.startswith("uv pip install ")
    # --torch-backend would go to PyTorch's own index in place of this one.
    assert call.endswith(" -c constraints.txt torch")


def test_an_empty_variable_is_no_index(tmp_path: Path) -> None:
    found = calls(tmp_path, "GPUS=/dev/nvidia0", UV_DEFAULT_INDEX="")
    assert found == ["pip install --quiet -c constraints.txt torch"]


def test_an_index_of_pip_or_one_that_is_given_wins_over_that_of_uv(tmp_path: Path) -> None:
    (first, second) = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (call,) = calls(first, configured="global.index-url='x'", **UV)
    assert call == "pip install --quiet -c constraints.txt torch"
    (call,) = calls(second, "TORCH_INDEX=https://b.example/cpu", **UV)
    assert "--index-url https://b.example/cpu torch" in call


@pytest.mark.parametrize(
    ("words", "variables", "which"),
    [
        (("GPUS=",), {}, "without CUDA"),
        (("GPUS=/dev/nvidia0",), {}, "with CUDA"),
        ((), {"configured": "global.index-url='x'"}, "index that pip is configured with"),
        ((), {"UV_INDEX_URL": "x"}, "index of UV_INDEX_URL;"),
        (("TORCH_INDEX=https://b.example/cpu",), {}, "from TORCH_INDEX"),
    ],
)
def test_one_line_says_which_torch_is_installed_and_names_torch_index(
    words: tuple[str, ...], variables: dict[str, str], which: str, tmp_path: Path
) -> None:
    _, printed = make_torch(tmp_path, *words, **variables)
    (line,) = printed.splitlines()
    assert line.startswith("torch ")
    assert which in line
    assert "TORCH_INDEX" in line
