"""Products by AMX's tiles, as they are compiled. What they compute is emulated in the contract of
all runners; that a processor computes the same is not tested."""

import re
import subprocess

import pytest

from nanochat_core.engine.native import build
from nanochat_core.engine.native.runner import unable
from nanochat_core.runtime.hardware import cpp_library
from tests.support.nanochat_core.engine.native_models import make_gpt, needs_kernels

pytestmark = [pytest.mark.torch, needs_kernels]

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


def test_the_kernels_compile_to_tile_instructions(tmp_path):
    compiler, library = cpp_library.find_compiler(), tmp_path / "products.o"
    (tmp_path / "products.cpp").write_text(SOURCE)
    flags = [flag for flag in build.LIBRARY.flags if flag not in ("-march=native", "-shared")]
    flags += ["-O1", "-march=sapphirerapids", f"-I{build.LIBRARY.folder}"]
    source = [*build.TILE_FLAGS["amx"], "-c", str(tmp_path / "products.cpp"), "-o", str(library)]
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
    names = ("ldtilecfg", "tileloadd", "tilezero", "tilestored", "tilerelease")
    assert all(name in listed for name in names)
    # AT&T's order: B, A, sum. Tiles 0 to 3 are the sums of two tiles of rows by two of columns.
    tiles = [f"%tmm{6 + n % 2},%tmm{4 + n // 2},%tmm{n}" for n in range(4)]
    found = set(re.findall(r"(tdp\w+) +(%tmm\d,%tmm\d,%tmm\d)", listed))
    assert found == {(product, each) for product in ("tdpbf16ps", "tdpbusd") for each in tiles}
    addresses = re.findall(r"tile(?:loadd|stored) .*\((.*)\)", listed)
    assert addresses
    assert all(re.fullmatch(r"%r\w+,%r\w+,1", address) for address in addresses)
    # ARCH_REQ_XCOMP_PERM and XTILEDATA, see arch_prctl(2)
    request, _, _ = listed.partition("<nf_request_tiles>:")[2].partition("\n\n")
    assert {"$0x1023", "$0x12"} <= set(re.findall(r"\$0x\w+", request))


@pytest.mark.parametrize("lacking", ["amx_tile", "amx_bf16", "amx_int8"])
def test_without_a_part_of_amx_the_runner_says_why(monkeypatch, lacking):
    flags = cpp_library.processor_flags() | build.AMX - {lacking}
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: flags - {lacking})
    assert unable(make_gpt(), "bf16", tiles="amx") == f"the processor lacks {lacking}"
    assert unable(make_gpt(), "fp32", tiles="amx") == "AMX multiplies bf16 and int8 only"


def test_a_system_that_does_not_permit_tiles_is_a_reason(monkeypatch):
    class Refusing:
        @staticmethod
        def nf_request_tiles():
            return 95

    monkeypatch.setattr(cpp_library.Library, "load", lambda *_: Refusing())
    reason = unable(make_gpt(), "bf16", tiles="emulated")
    assert reason.startswith("Linux does not permit AMX: ")
