"""How a profile's kernels are divided among classes and sections."""

import pytest

pytest.importorskip("torch")
from bench.gpu.profiles import Event, class_of, merged, summary

pytestmark = pytest.mark.torch


KERNELS = {
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7": "attention",
    "add_rows": "tables",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>": "tables",
    "triton_red_fused__log_softmax_nll_loss_forward_3": "loss",
    "triton_poi_fused_add_mul_5": "compiled",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "void at::native::reduce_kernel<512, 1>": "sums",
    "aten::_scaled_mm": "products",
    "something": "other",
}


def test_a_kernel_has_a_class_by_its_name() -> None:
    assert {kernel: class_of(kernel) for kernel in KERNELS} == KERNELS


def test_a_summary_has_each_class_in_each_section_and_the_gaps() -> None:
    def event(name: str, begin: float, end: float) -> Event:
        return Event(name=name, span=(begin, end), microseconds=end - begin)

    found = summary(
        [
            event("section optimizer", 100.0, 200.0),
            event("nvjet_1", 0.0, 50.0),
            event("triton_1", 50.0, 60.0),
            event("nvjet_1", 120.0, 160.0),
            event("section loss", 300.0, 310.0),
            event("triton_2", 301.0, 321.0),
        ]
    )
    assert found["classes"] == {
        "rest": {"products": 0.05, "compiled": 0.01},
        "optimizer": {"products": 0.04},
        "loss": {"compiled": 0.02},
    }
    assert (found["milliseconds"], found["events"]) == (0.321, 4)
    assert (found["gaps"], found["gap_milliseconds"]) == (2, 0.201)
    assert found["busy"] == round(120 / 321, 4)
    assert found["longest"][0] == {"name": "nvjet_1", "count": 2, "milliseconds": 0.09}


def test_overlapping_kernels_count_once() -> None:
    assert merged([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0)]) == [(0.0, 3.0), (5.0, 7.0)]
