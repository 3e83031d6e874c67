"""What a GPU should reach: beside runs that nanochat has published, and by its data sheet."""

import dataclasses
import re

import pytest

from nanochat_core.errors import ConfigError
from nanochat_core.roofline import most_decoded, named_gpu, pretraining, training_bytes
from nanochat_core.runtime.hardware.gpu_specs import GPUS, find_gpu_spec, peak_flops
from nanochat_core.scaling import flops_per_token, run_for_depth

H100 = named_gpu("h100")
CLOSE = 0.08
# nanochat at 92d63d4, on H100s. Depth, precision, tokens per second and GPU: None where its MFU is
# what was published.
PUBLISHED = {
    "d12, dev/LOG.md, MTP": (12, "bf16", None, 0.41),
    "d18, dev/LOG.md, MoE": (18, "bf16", None, 0.46),
    "d24, LEADERBOARD.md run 1": (24, "bf16", None, 4.330784131228946e19 / 10949 / 8 / 989e12),
    "d26, LEADERBOARD.md run 2": (26, "fp8", 14889 * 2**19 / 10493 / 8, None),
    "d26, LEADERBOARD.md run 3": (26, "fp8", 7226 * 2**20 / 9922 / 8, None),
    "d24, README.md row 6, 8 tokens a parameter": (24, "fp8", 8 * 730e6 / (1.65 * 3600) / 8, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_near_what_nanochat_has_published(name):
    depth, precision, tokens_per_second, mfu = PUBLISHED[name]
    pace = pretraining(run_for_depth(depth), H100, precision)
    found, published = (
        (pace.mfu, mfu)
        if tokens_per_second is None
        else (pace.tokens_per_second, tokens_per_second)
    )
    assert found == pytest.approx(published, rel=CLOSE)


def test_mfu_counts_nanochats_flops_and_the_times_add_up():
    run = run_for_depth(20)
    pace = pretraining(run, H100, "bf16")
    flops = pace.tokens_per_second * flops_per_token(run.model, run.numerics)
    assert pace.mfu == pytest.approx(flops / H100.bf16)
    tokens = run.pretrain.num_steps * run.pretrain.total_batch_size
    assert pace.gpu_seconds == pytest.approx(tokens / pace.tokens_per_second)


def test_bytes_count_beside_flops():
    run = run_for_depth(12)
    slower = dataclasses.replace(H100, bandwidth=H100.bandwidth / 2)
    one, other = (pretraining(run, gpu, "bf16") for gpu in (H100, slower))
    assert 1.1 < one.tokens_per_second / other.tokens_per_second < 2
    assert most_decoded(run, H100) == pytest.approx(2 * most_decoded(run, slower))


def test_what_is_not_known_has_no_pace():
    run = run_for_depth(12)
    assert pretraining(run, named_gpu("A100"), "fp8") is None
    assert pretraining(run, H100, "fp32") is None


# docs/reference/gpu.md: the first line was measured, which the activations were fitted to.
@pytest.mark.parametrize(
    ("depth", "rows", "alone", "shared"),
    [(12, 16, 17.9e9, 16.4e9), (24, 16, 68.3e9, 60.7e9), (32, 8, 79.4e9, 63.9e9)],
)
def test_memory_is_that_of_the_table(depth, rows, alone, shared):
    run = run_for_depth(depth)
    assert training_bytes(run, 1, rows=rows) == pytest.approx(alone, rel=0.01)
    assert training_bytes(run, 8, rows=rows) == pytest.approx(shared, rel=0.01)


def names_of(text):
    return re.split(r", |,?\n", text.strip())


SHORT = names_of("""
h100, H100-PCIe, 4090, NVIDIA GH200 480GB, l4, a6000, a100 sxm4 40gb, A100 40GB, rtx3060, v100
V100 PCIe, V100 32GB PCIe, V100 32GB, H100 80GB PCIe, H100-PCIE-80G, a100 pcie, A100 PCIe 40GB
a100-80g, H100 94GB NVL, NVL H200 141GB, gh200 96gb, GH200 144GB
""")
UNKNOWN = names_of("""
m4, 100, A10, 4070 Ti, gb10, h20, H800 PCIe, H200 PCIe, H100 96GB, H100 94GB PCIe, H100 NVL PCIe
quadro, RTX
""")


def test_a_person_may_name_a_gpu_shortly_and_an_unknown_one_is_refused(transcript):
    lines = (f"{name}: {named_gpu(name).name}" for name in SHORT)
    transcript.check("short names", "\n".join(lines))
    for name in (*UNKNOWN, ""):
        transcript.refused(repr(name), ConfigError, named_gpu, name)


# What torch calls devices. The second half is not of the table, though it contains names that are.
DEVICES = names_of("""
NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe, NVIDIA H200 NVL, NVIDIA A100 80GB PCIe
NVIDIA A100-SXM4-80GB, NVIDIA A100-PCIE-40GB, NVIDIA B300 SXM6 AC, NVIDIA GeForce RTX 3060
NVIDIA GeForce RTX 5070, NVIDIA RTX A6000, Tesla T4, Tesla V100-SXM2-32GB, AMD Instinct MI300X
AMD Instinct MI300X OAM, NVIDIA GH200 144G HBM3e, NVIDIA A800 80GB PCIe, Tesla V100-PCIE-32GB
NVIDIA H800 PCIe, NVIDIA H100 64GB, NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA GB300
NVIDIA GeForce RTX 4090 D, NVIDIA GeForce RTX 4070 SUPER, NVIDIA GeForce RTX 3060 Ti
NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA A100-SXM4-64GB, NVIDIA L400, cpu
""")


def test_a_gpu_is_known_by_its_exact_name(transcript):
    specs = {name: find_gpu_spec(name) for name in (*DEVICES, "")}
    lines = (f"{name}: {spec.name if spec else 'unknown'}" for name, spec in specs.items())
    transcript.check("devices", "\n".join(lines))
    assert all(peak_flops(name) == (spec and spec.bf16) for name, spec in specs.items())


def test_every_row_of_the_table_is_found_by_its_own_name():
    assert [find_gpu_spec(f"NVIDIA {spec.name}") for spec in GPUS] == list(GPUS)
    for spec in GPUS:
        assert spec.fp8 is None or 1.9 < spec.fp8 / spec.bf16 < 2.1
