"""Products by AMX's tiles: emulated here against float64 and the other kernels, and compiled.

The emulation follows the instructions' definition; that a processor does is not tested.
"""

import ctypes
import dataclasses
import re
import subprocess
from functools import cache

import pytest
import torch

from nanochat_core.engine.native import build
from nanochat_core.engine.native.memory import Arena
from nanochat_core.engine.native.runner import unable
from nanochat_core.engine.native.weights import PackedMatrix
from nanochat_core.runtime.hardware import cpp_library
from tests.support.nanochat_core.engine.engine_case import needs_kernels
from tests.support.nanochat_core.engine.native_models import make_gpt

pytestmark = [pytest.mark.torch, needs_kernels]

# A product alone, of rows in bf16 or bytes (byte - zero).
SOURCE = """
#include "kernels_matrix.h"
template <class Form>
static void product(const Matrix* m, const int32_t* a, const float* scales, int zero, int first,
                    int rows, int panel, int panels, float* out) {
  const Activations given{a, static_cast<size_t>(m->steps), scales, zero};
  multiply<Form>(*m, given, first, rows, panel, panels, [&](int row, int p, Floats x) {
    store(out + (static_cast<size_t>(row) * m->panels + p) * 16, x);
  });
}
extern "C" void bf16(const Matrix* m, const int32_t* a, const float* s, int z, int first, int rows,
                     int panel, int panels, float* out) {
  product<Bf16>(m, a, s, z, first, rows, panel, panels, out);
}
extern "C" void int8(const Matrix* m, const int32_t* a, const float* s, int z, int first, int rows,
                     int panel, int panels, float* out) {
  product<Int8>(m, a, s, z, first, rows, panel, panels, out);
}
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """Return the products' library without tiles or with emulated ones."""
    folder = tmp_path_factory.mktemp("products")
    headers = [name for name in build.LIBRARY.files if name.endswith(".h")]
    for name in headers:
        (folder / name).write_bytes((build.LIBRARY.folder / name).read_bytes())
    (folder / "products.cpp").write_text(SOURCE)

    @cache
    def load(tiles):
        pointer, number = ctypes.c_void_p, ctypes.c_int
        arguments = (*(pointer,) * 3, *(number,) * 5, pointer)
        return dataclasses.replace(
            build.LIBRARY,
            folder=folder,
            files=("products.cpp", *headers),
            functions=(("bf16", None, arguments), ("int8", None, arguments)),
            flags=(*build.LIBRARY.flags, *build.TILE_FLAGS[tiles]),
        ).load(folder)

    return load


class Case:
    """A packed matrix and rows, and the exact product of what they were rounded to."""

    def __init__(self, precision, num_out, num_in, rows):
        generator = torch.Generator().manual_seed(num_out + num_in)
        self.precision = precision
        self.matrix = PackedMatrix(num_out, num_in, precision, Arena())
        weights = torch.randn(num_out, num_in, generator=generator)
        self.matrix.fill(weights)
        x = torch.randn(rows, self.matrix.shape[1], generator=generator)
        x[:, num_in:] = 0
        self.scales = torch.rand(rows, generator=generator) + 0.5
        if precision == "bf16":
            self.rows = x.bfloat16()
            exact = self.rows.double() @ weights.bfloat16().double().T
        else:
            self.rows = (x * 40 + 128).round().clamp(0, 255).to(torch.uint8)
            whole = (weights / self.matrix.scales[:num_out, None]).round().double()
            exact = (self.rows.double()[:, :num_in] - 128) @ whole.T
            exact *= self.scales.double()[:, None] * self.matrix.scales[:num_out].double()
        self.exact = exact

    def run(self, library, first, rows, panel, panels):
        """Return the whole output (rows, N), of which only this part is computed."""
        out = torch.full((len(self.rows), self.matrix.shape[0]), torch.nan)
        spec = self.matrix.spec()
        function = getattr(library, self.precision)
        pointers = (ctypes.byref(spec), self.rows.data_ptr(), self.scales.data_ptr())
        function(*pointers, 128, first, rows, panel, panels, out.data_ptr())
        return out


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("num_in", [64, 192, 80], ids=["one", "three", "part"])
def test_products_are_those_of_float64_whatever_rows_are_next_to_one(products, precision, num_in):
    case = Case(precision, num_out=80, num_in=num_in, rows=77)
    whole = case.run(products("emulated"), 0, 77, 0, 5)
    bound = 3e-6 * num_in**0.5 * case.exact.abs().max().item()
    torch.testing.assert_close(whole[:, :80].double(), case.exact, rtol=0, atol=bound)
    without = case.run(products("none"), 0, 77, 0, 5)
    # Integers are exact, and so is the rule: 80 inputs fill no register, and take no tile.
    assert torch.equal(without, whole) == (precision == "int8" or num_in == 80)
    for first, rows, panel, panels in (
        *((40, count, 0, 5) for count in (1, 3, 15, 16, 17, 31, 32, 33)),
        *((0, 77, at, 5 - at) for at in range(5)),
    ):
        part = case.run(products("emulated"), first, rows, panel, panels)
        lines = slice(first, first + rows), slice(16 * panel, 16 * (panel + panels))
        assert torch.equal(part[lines], whole[lines])
        part[lines] = torch.nan
        assert part.isnan().all()  # nothing else is written


def test_a_small_number_is_0_as_in_the_instruction(products):
    case = Case("bf16", num_out=16, num_in=64, rows=2)
    case.rows.zero_()
    case.rows[0, 0], case.rows[1, 0] = 2.0**-100, 2.0**-10
    case.matrix.fill(torch.full((16, 64), 2.0**-30))
    out = case.run(products("emulated"), 0, 2, 0, 1)
    assert (out[0] == 0).all()  # 2^-130 is subnormal
    assert (out[1] == 2.0**-40).all()


def test_the_kernels_compile_to_tile_instructions(tmp_path):
    compiler, library = cpp_library.find_compiler(), tmp_path / "products.o"
    (tmp_path / "products.cpp").write_text(
        SOURCE + 'extern "C" int nf_request_tiles() { return request_tiles(); }\n'
    )
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
