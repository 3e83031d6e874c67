"""The kernels are built once, whole or not at all, and what stands in the way is told."""

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_core.engine.native import build
from nanochat_core.engine.native.build import Unavailable, load_kernels, unable_here
from nanochat_core.runtime.user_cache import user_cache

REASON = unable_here()
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
NAMES = ("nf_close", "nf_read", "nf_step", "nf_sample", "nf_decode")
BUILD = """
import sys, time
from pathlib import Path
from nanochat_core.engine.native import build
build.SOURCES, compile = Path(sys.argv[2]), build._build
def count(*order):
    with Path(sys.argv[1], "builds").open("a") as file:
        file.write("x")
    time.sleep(float(sys.argv[3]))
    return compile(*order)
build._build = count
print(build.load_kernels(Path(sys.argv[1])).nf_open(1, 2))
"""


@pytest.fixture(autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the kernels: theirs take seconds to build."""
    folder = tmp_path_factory.mktemp("sources")
    empty = "".join(f"void {name}() {{}}\n" for name in NAMES)
    opener = "long nf_open(long first, long second) { return first + second; }\n"
    (folder / "kernels.cpp").write_text(f'extern "C" {{\n{empty}{opener}}}\n')
    for name in build.FILES[1:]:
        (folder / name).write_text("// nothing\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    build._read_sources.cache_clear()
    return folder


def fingerprint() -> str:
    build._read_sources.cache_clear()
    build._fingerprint.cache_clear()
    compiler = build.find_compiler()
    assert compiler is not None
    return build._fingerprint(compiler, build._read_sources(build.SOURCES))


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "kernels").iterdir())


@needs_kernels
def test_of_processes_that_start_together_one_builds_and_all_load(
    tmp_path: Path, sources: Path
) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path), str(sources), "2"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    output = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert output[0][0] == output[1][0] == "3\n"
    assert (tmp_path / "builds").read_text() == "x"
    (library,) = libraries(tmp_path)
    before = library.stat().st_mtime_ns
    load_kernels(tmp_path)
    assert libraries(tmp_path) == [library]
    assert library.stat().st_mtime_ns == before  # found, not built again


@needs_kernels
@pytest.mark.parametrize("rubbish", [b"", b"\x7fELF", os.urandom(10_000)])
def test_a_file_that_does_not_load_is_built_again(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "kernels" / f"{fingerprint()}.so"
    path.parent.mkdir()
    path.write_bytes(rubbish)
    library = load_kernels(tmp_path)
    assert isinstance(library, ctypes.CDLL)
    assert path.stat().st_size > len(rubbish)
    assert libraries(tmp_path) == [path]


def spoil(data: bytes, how: str) -> bytes:
    """A library as a full disk, or a failing one, leaves it."""
    if how == "zeroed":
        return data[: len(data) // 3] + bytes(4096) + data[len(data) // 3 + 4096 :]
    return data[: int(len(data) * float(how))]


@needs_kernels
@pytest.mark.parametrize("how", ["0.25", "0.5", "0.9", "0.99", "zeroed"])
def test_a_damaged_library_is_built_again(tmp_path: Path, sources: Path, how: str) -> None:
    load_kernels(tmp_path)
    (path,) = libraries(tmp_path)
    whole = path.read_bytes()
    spoiled = tmp_path / "spoiled"  # a copy: this process has the other one mapped
    spoiled.write_bytes(spoil(whole, how))
    spoiled.replace(path)
    command = [sys.executable, "-c", BUILD, str(tmp_path), str(sources), "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (found.returncode, found.stdout) == (0, "3\n"), found.stderr
    assert len(path.read_bytes()) == len(whole)


@needs_kernels
def test_another_programs_library_is_built_again(tmp_path: Path, sources: Path) -> None:
    text = (sources / "kernels.cpp").read_text()
    (sources / "kernels.cpp").write_text("int nothing;\n")
    build._read_sources.cache_clear()
    with pytest.raises(Unavailable, match=r"cannot be stored in .*nf_open"):
        load_kernels(tmp_path)
    assert libraries(tmp_path) == []  # what does not load is not kept
    other = tmp_path / "other.so"
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", str(sources / "kernels.cpp"), "-o", other], check=True)
    (sources / "kernels.cpp").write_text(text)
    data = other.read_bytes()
    path = tmp_path / "kernels" / f"{fingerprint()}.so"
    path.write_bytes(data + hashlib.sha256(data).digest())
    assert load_kernels(tmp_path).nf_open(1, 2) == 3


@needs_kernels
def test_a_file_of_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernels(tmp_path)
    (path,) = libraries(tmp_path)
    before = path.stat().st_ino
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    load_kernels(tmp_path)
    assert path.stat().st_ino != before


@needs_kernels
@pytest.mark.parametrize("name", ["open", "mkdir"])
def test_a_folder_of_another_user_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(path: Path, *_args: object, **_settings: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    fingerprint()  # kept: it reads files, too
    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(Unavailable, match=r"cannot be stored in .*Permission denied"):
        load_kernels(tmp_path)


@needs_kernels
def test_without_a_home_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(Unavailable, match="no cache folder for the kernels"):
        load_kernels()


@needs_kernels
def test_another_source_or_header_or_flag_is_another_file(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [fingerprint()]
    (sources / "kernels_sample.h").write_text("// something\n")
    names.append(fingerprint())
    (sources / "kernels.cpp").write_text("// another\n")
    names.append(fingerprint())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.append(fingerprint())
    assert len(set(names)) == 4


def test_without_a_compiler_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    reason = unable_here(build.NEEDED_FLAGS)
    assert reason is not None
    assert "no C++ compiler" in reason


def test_a_processor_that_lacks_something_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    reason = unable_here(build.NEEDED_FLAGS - {"avx512_bf16"})
    assert reason == "the processor lacks avx512_bf16"
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    assert "arm64" in (unable_here(build.NEEDED_FLAGS) or "")


@needs_kernels
def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(
    tmp_path: Path, sources: Path
) -> None:
    (sources / "kernels.cpp").write_text("no program")
    with pytest.raises(Unavailable, match=r"does not build the kernels: .*error"):
        load_kernels(tmp_path)
    assert libraries(tmp_path) == []


@needs_kernels
def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(Unavailable, match="cannot be stored in"):
        load_kernels(blocked)


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == tmp_path / ".cache" / "nanochat-flows"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert user_cache() == tmp_path / "own" / "nanochat-flows"
