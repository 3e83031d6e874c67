"""The kernels are built once, whole or not at all, and what prevents it is reported."""

import ctypes
import dataclasses
import hashlib
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat_core.build_kernels import build_kernels
from nanochat_core.engine.native.build import AMX, LIBRARY, TILE_FLAGS
from nanochat_core.engine.native.runner import unable
from nanochat_core.engine.native.weights import FORMS
from nanochat_core.model.native import build as training
from nanochat_core.runtime.hardware import cpp_library
from nanochat_core.runtime.hardware.cpp_library import Library, Unavailable
from nanochat_core.runtime.user_cache import user_cache
from tests.support.nanochat_core.engine.native_models import make_gpt, needs_kernels

pytestmark = pytest.mark.torch


@pytest.fixture
def library(tmp_path_factory):
    """A library that takes less time to build than the kernels."""
    folder = tmp_path_factory.mktemp("sources")
    opener = "long nf_open(long first, long second) { return first + second; }\n"
    (folder / "kernels.cpp").write_text(f'extern "C" {{\n{opener}}}\n')
    (folder / "kernels_sample.h").write_text("// nothing\n")
    found = Library(
        folder=folder,
        files=("kernels.cpp", "kernels_sample.h"),
        needed_flags=frozenset(),
        functions=(("nf_open", ctypes.c_int64, (ctypes.c_int64,) * 2),),
    )
    if (reason := found.unable_here()) is not None:
        pytest.skip(f"no kernels here: {reason}")
    return found


def fingerprint(library):
    cpp_library._read.cache_clear()
    compiler = cpp_library.find_compiler()
    return library.fingerprint(compiler, library.read_sources())


def libraries(cache):
    return sorted((cache / "kernels").iterdir())


def test_what_is_built_before_a_stage_is_what_training_and_the_engine_load_in_fp32(monkeypatch):
    loaded = []
    monkeypatch.setattr(Library, "load", lambda library, cache=None: loaded.append(library))
    build_kernels()
    flags = (*LIBRARY.flags, f"-DNF_FORM={FORMS.index('fp32')}")
    assert loaded == [training.LIBRARY, dataclasses.replace(LIBRARY, flags=flags)]


def test_what_a_killed_build_left_is_removed_by_a_later_one(tmp_path, library):
    old, new = tmp_path / "kernels" / "build-old", tmp_path / "kernels" / "build-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "kernels.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    # Another process ends just now: its folder is listed, and is gone when it is looked at.
    (tmp_path / "kernels" / "build-ended").symlink_to("gone")
    assert library.load(tmp_path).nf_open(1, 2) == 3
    assert [path.name for path in libraries(tmp_path) if path.is_dir()] == [new.name]


def test_of_those_that_start_together_one_builds_and_all_load(tmp_path, monkeypatch, library):
    compile, builds = Library.build, []

    def build(*order):
        builds.append(order)
        time.sleep(0.5)  # the other one comes meanwhile
        return compile(*order)

    monkeypatch.setattr(Library, "build", build)
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(library.load, [tmp_path] * 2)
        assert [loaded.nf_open(1, 2) for loaded in found] == [3, 3]
    library.load(tmp_path)
    assert len(builds) == len(libraries(tmp_path)) == 1


def spoiled(library, whole, how):
    """Return a library as a full or failing disk leaves it, or another program's."""
    if how == "zeroed":
        return whole[:2000] + bytes(4096) + whole[6096:]
    if how == "another program's":
        source, other = library.folder / "other.cpp", library.folder / "other.so"
        source.write_text("int nothing;\n")
        compiler = cpp_library.find_compiler()
        subprocess.run([compiler, "-shared", str(source), "-o", str(other)], check=True)
        return other.read_bytes() + hashlib.sha256(other.read_bytes()).digest()
    return whole[: int(len(whole) * how)]


@pytest.mark.parametrize("how", [0, 0.5, 0.99, 1, "zeroed", "another program's"])
def test_what_is_not_our_own_whole_library_is_built_again(tmp_path, monkeypatch, how, library):
    library.load(tmp_path)
    (path,) = libraries(tmp_path)
    whole, copy = path.read_bytes(), tmp_path / "copy"  # this process has the first one mapped
    copy.write_bytes(spoiled(library, whole, how))
    copy.replace(path)
    before = path.stat().st_ino
    if how == 1:  # whole, but of another user
        if os.geteuid() == 0:
            os.chown(path, 54321, -1)
        monkeypatch.setattr(cpp_library.os, "geteuid", lambda: 12345)
    assert library.load(tmp_path).nf_open(1, 2) == 3
    assert path.stat().st_ino != before
    assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize("name", ["open", "mkdir"])
def test_a_folder_of_another_user_is_a_reason(tmp_path, monkeypatch, name, library):
    def refuse(path, *_args, **_settings):
        raise PermissionError(13, "Permission denied", str(path))

    fingerprint(library)  # kept: it reads files, too
    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(Unavailable, match=r"cannot be stored in .*Permission denied"):
        library.load(tmp_path)


def test_without_a_home_the_reason_is_named(monkeypatch, library):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(Unavailable, match="no cache folder for the kernels"):
        library.load()


def test_another_source_or_header_or_flag_is_another_file(library):
    names = [fingerprint(library)]
    for name in library.files:
        (library.folder / name).write_text("// another\n")
        names.append(fingerprint(library))
    names.append(fingerprint(dataclasses.replace(library, flags=(*library.flags, "-g"))))
    assert len(set(names)) == 4


def test_a_machine_that_cannot_build_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(cpp_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: frozenset(["avx2"]))
    assert LIBRARY.unable_here() == "the processor lacks fma"
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: LIBRARY.needed_flags)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in (LIBRARY.unable_here() or "")
    monkeypatch.setattr(cpp_library.platform, "machine", lambda: "arm64")
    assert "arm64" in (LIBRARY.unable_here() or "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("no program", r"does not build the kernels: .*error"),
        ("int nothing;", r"cannot be stored in .*nf_open"),
    ],
)
def test_what_does_not_compile_or_load_is_a_reason_and_leaves_nothing(
    tmp_path, library, source, reason
):
    (library.folder / "kernels.cpp").write_text(source)
    with pytest.raises(Unavailable, match=reason):
        library.load(tmp_path)
    assert libraries(tmp_path) == []


def test_the_cache_is_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == tmp_path / ".cache" / "nanochat-flows"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert user_cache() == tmp_path / "own" / "nanochat-flows"


# What AMX's tiles compute is emulated, and compared with a processor, in the contract of runners.

TILE_CODE = {"ldtilecfg", "tileloadd", "tilezero", "tilestored", "tilerelease"}
# A product alone, which compiles in less time than all kernels.
SOURCE = """
#include "kernels_matrix.h"
template <class Form>
void product(const Matrix& m, const Activations& given, float* out) {
  multiply<Form>(m, given, 0, 32, 0, m.panels, [&](int row, int p, Floats x) {
    store(out + (static_cast<size_t>(row) * m.panels + p) * 16, x);
  });
}
template void product<Bf16>(const Matrix&, const Activations&, float*);
template void product<Int8>(const Matrix&, const Activations&, float*);
extern "C" int nf_request_tiles() { return request_tiles(); }
"""


@needs_kernels
def test_the_kernels_compile_to_tile_instructions(tmp_path):
    compiler, library = cpp_library.find_compiler(), tmp_path / "products.o"
    (tmp_path / "products.cpp").write_text(SOURCE)
    flags = [flag for flag in LIBRARY.flags if flag not in ("-march=native", "-shared")]
    flags += ["-O1", "-march=sapphirerapids", f"-I{LIBRARY.folder}"]
    source = [*TILE_FLAGS["amx"], "-c", str(tmp_path / "products.cpp"), "-o", str(library)]
    command = [compiler, *flags, *source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "sapphirerapids" in done.stderr:
        pytest.skip("the compiler does not know a processor with AMX")
    assert done.returncode == 0, done.stderr
    try:
        command = ["objdump", "-d", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no objdump")
    assert set(re.findall(r"\w+", listed)) >= TILE_CODE
    # AT&T's order: B, A, sum. Tiles 0 to 3 are sums: two tiles of rows by two, or one by four.
    tiles = {f"%tmm{6 + n % 2},%tmm{a},%tmm{n}" for n in range(4) for a in (4, 4 + n // 2)}
    found = set(re.findall(r"(tdp\w+) +(%tmm\d,%tmm\d,%tmm\d)", listed))
    assert found == {(product, each) for product in ("tdpbf16ps", "tdpbusd") for each in tiles}
    addresses = re.findall(r"tile(?:loadd|stored) .*\((.*)\)", listed)
    assert addresses
    assert all(re.fullmatch(r"%r\w+,%r\w+,1", address) for address in addresses)
    # ARCH_REQ_XCOMP_PERM and XTILEDATA, see arch_prctl(2)
    request, _, _ = listed.partition("<nf_request_tiles>:")[2].partition("\n\n")
    assert {"$0x1023", "$0x12"} <= set(re.findall(r"\$0x\w+", request))


@needs_kernels
@pytest.mark.parametrize("lacking", ["amx_tile", "amx_bf16", "amx_int8"])
def test_without_a_part_of_amx_the_runner_says_why(monkeypatch, lacking):
    flags = cpp_library.processor_flags() | AMX - {lacking}
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: flags - {lacking})
    assert unable(make_gpt(), "bf16", tiles="amx") == f"the processor lacks {lacking}"
    assert unable(make_gpt(), "fp32", tiles="amx") == "AMX multiplies bf16 and int8 only"


@needs_kernels
def test_a_system_that_does_not_permit_tiles_is_a_reason(monkeypatch):
    class Refusing:
        @staticmethod
        def nf_request_tiles():
            return 95

    monkeypatch.setattr(cpp_library.Library, "load", lambda *_: Refusing())
    reason = unable(make_gpt(), "bf16", tiles="emulated")
    assert reason.startswith("Linux does not permit AMX: ")
