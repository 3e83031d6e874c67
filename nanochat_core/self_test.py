"""A test of some 20 s of one GPU: what this project uses on it, whether that computes right, and
how fast the GPU is at best.

    python -m nanochat_core.self_test

Prints a line of JSON for each finding as soon as it is there: `name`, `state` ("ok", "warn" or
"fail"), `found`, `remedy`, and `values` for programs. `--device cpu` tests a CPU in the same way.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from nanochat_core.engine.requests import Event, Request, SamplingParams, TokenEvent
from nanochat_core.engine.runners.choose import Choice, open_runner
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.speed import make_endless, read_bandwidth, wait_for_gpu
from nanochat_core.errors import ConfigError, first_line
from nanochat_core.job import ATTENTION_PACKAGES
from nanochat_core.model.attention import choose
from nanochat_core.model.attention_backends import BACKENDS, MISSING, SDPA, Backend, preferred
from nanochat_core.model.fp8 import E4M3, check_device
from nanochat_core.model.gpt import GPT
from nanochat_core.model.layers import activation_dtype
from nanochat_core.runtime.hardware.gpu_specs import find_gpu_spec
from nanochat_core.scaling import model_for_depth, numerics

# Of the gradient's norm, by which it may differ from a CPU's in fp32. A CPU's own in bf16 and fp8
# differs by 0.026 and 0.24.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.06, "fp8": 0.4}
DEPTH, LENGTH, WORDS = 2, 256, 512  # of the tested model, of width 128
ROWS = 2
PROMPT, ANSWERED = 10, 24  # tokens
SQUARE, SMALL = 8192, 256  # sides of the products that are timed, on a GPU and on a CPU
SLOW = 0.5  # of the data sheet: below, something is wrong
_UPDATE = "update the GPU's driver, torch and these packages"


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the driver says of a device."""

    name: str
    capability: tuple[int, int] | None  # None: it is a CPU
    memory: int  # bytes
    processors: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A finding. `values`: the device's name and bytes of memory, measured bytes/s and FLOP/s."""

    name: str = ""
    state: str = "ok"
    found: str
    remedy: str | None = None
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def main() -> None:
    """Test the device, and print each finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for line in run_tests(device):
        sys.stdout.write(json.dumps(asdict(line)) + "\n")
        sys.stdout.flush()


def run_tests(device: torch.device) -> Iterator[Line]:
    """Yield every finding. A test that fails hides none of the others."""
    found = read_device(device)
    tests: dict[str, Callable[[], Line]] = {
        "device": partial(describe, found),
        "attention": partial(attention, device, found),
        "fp8": partial(fp8, device),
        **{f"train {p}": partial(training, device, p) for p in TOLERANCES},
        "decode fp32": partial(decoding, device, "fp32"),
        "decode bf16": partial(decoding, device, "bf16"),
        "graphs": partial(decoding, device, "bf16", "cuda graphs"),
        "speed": partial(speeds, device, found),
    }
    if not has_fp8(device):
        del tests["train fp8"]
    for name, test in tests.items():
        try:
            yield replace(test(), name=name)
        except Exception as error:  # noqa: BLE001 - kernels of third parties: anything may come
            found = f"{type(error).__name__}: {first_line(error)}"
            yield Line(name=name, state="fail", found=found)


def read_device(device: torch.device) -> Device:
    """Read the properties of the device. Nothing else here asks the driver for them."""
    if device.type != "cuda":
        return Device(name=device.type, capability=None, memory=0, processors=0)
    found = torch.cuda.get_device_properties(device)
    return Device(
        name=found.name,
        capability=(found.major, found.minor),
        memory=found.total_memory,
        processors=found.multi_processor_count,
    )


def describe(device: Device) -> Line:
    """Return what the device is."""
    versions = f"torch {torch.__version__}"
    if device.capability is None:
        return Line(found=f"{device.name}, {versions}")
    try:
        versions += f", CUDA {torch.version.cuda}, triton {version('triton')}"
    except PackageNotFoundError:
        versions += f", CUDA {torch.version.cuda}, no triton: nothing is compiled"
    major, minor = device.capability
    return Line(
        found=f"{device.name}, compute capability {major}.{minor}, {device.processors} "
        f"processors, {device.memory / 1e9:.0f} GB, {versions}",
        values={"gpu": device.name, "memory": device.memory},
    )


def attention(device: torch.device, found: Device) -> Line:
    """Return which backend `auto` takes in bf16, and why not those that it prefers."""
    reasons: list[str] = []
    missing: list[Backend] = []
    major = found.capability[0] if found.capability else None
    for backend in preferred(BACKENDS, major):
        reason = backend.unable(device, torch.bfloat16)
        if reason is None:
            slow = backend is SDPA and found.capability is not None
            return Line(
                state="warn" if slow else "ok",
                found="; not ".join([f"{backend.name} for training and evaluation", *reasons]),
                remedy=_install(missing, major) or (_UPDATE if slow else None),
            )
        reasons.append(f"{backend.name}: {reason}")
        if reason.startswith(MISSING) and backend.name in ATTENTION_PACKAGES:
            missing.append(backend)
    raise AssertionError("sdpa runs everywhere")


def _install(missing: Sequence[Backend], major: int | None) -> str:
    """Return how to install each backend: first what a GPU has run, last what pip does not have."""
    lines: list[tuple[bool, bool, str]] = []
    for backend in missing:
        how = ATTENTION_PACKAGES[backend.name][1]
        is_flash = backend.name.startswith("fa")  # no GPU has run these, see attention_backends.py
        fits = "written for this GPU, " if major in backend.written_for else ""
        note = f" ({fits}not tried)" if is_flash else ""
        lines.append((not how.startswith("pip "), is_flash, f"{backend.name}{note}: {how}"))
    return "; ".join(line for *_, line in sorted(lines))


def has_fp8(device: torch.device) -> bool:
    """Return whether products can be in fp8; on a CPU they can, slowly."""
    return fp8(device).state == "ok"


def fp8(device: torch.device) -> Line:
    """Return whether training in fp8 is possible."""
    try:
        check_device(device)
    except ConfigError as error:
        return Line(state="warn", found=str(error), remedy=error.hint)
    return Line(found="can train: --set numerics.precision=fp8")


def make_model(precision: str, device: torch.device) -> GPT:
    """Return the tested model: every weight is random, so that each part of it matters."""
    shape = model_for_depth(DEPTH, sequence_len=LENGTH, vocab_size=WORDS)
    model = GPT(shape, numerics(precision))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(device)


def gradients(precision: str, device: torch.device) -> tuple[float, torch.Tensor]:
    """Return the mean loss of random rows, and all gradients in one vector on the CPU."""
    model = make_model(precision, device)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator).to(device)
    choose("auto", device, activation_dtype(precision, device))
    loss = model.summed_loss(tokens[:, :-1], tokens[:, 1:]) / (ROWS * LENGTH)
    loss.backward()
    parts = [
        p.grad.detach().float().cpu().flatten() for p in model.parameters() if p.grad is not None
    ]
    return float(loss.detach()), torch.cat(parts)


def training(device: torch.device, precision: str) -> Line:
    """Compare loss and gradient with those of a CPU in fp32."""
    expected_loss, expected = gradients("fp32", torch.device("cpu"))
    loss, found = gradients(precision, device)
    error = float((found - expected).norm() / expected.norm())
    loss_error = abs(loss - expected_loss) / expected_loss
    worst, most = max(error, loss_error), TOLERANCES[precision]
    return Line(
        state="ok" if worst <= most else "fail",  # NaN fails
        found=f"gradient within {error:.2g} of a CPU's in fp32, loss {loss_error:.2g}; "
        f"{most:g} allowed",
        remedy=None if worst <= most else "try --place attention=sdpa; else do not train here",
    )


def decoding(device: torch.device, precision: str, name: str | None = None) -> Line:
    """Let a runner answer greedily, and compare its tokens with a CPU's logits in fp32.

    `name` of the runner; None means that which is chosen here.
    """
    chosen: list[Choice] = []
    try:
        runner = open_runner(
            make_model(precision, device).eval(),
            stop_tokens=(),
            runner=name,
            on_choice=chosen.append,
            precision=precision,
            num_slots=1,
            max_len=LENGTH,
        )
    except ConfigError as error:
        return Line(found=str(error))
    tokens = list(range(PROMPT))

    def sink(event: Event) -> None:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)

    scheduler = make_endless(runner, context=LENGTH)
    params = SamplingParams(temperature=0.0)
    scheduler.submit(Request(prompt=tuple(tokens), sink=sink, max_tokens=ANSWERED, params=params))
    while scheduler.step():
        pass
    gap, most = behind(tokens), TOLERANCES[precision]
    with_attention = f" with {runner.attention}" if isinstance(runner, DeviceRunner) else ""
    return Line(
        state="ok" if gap <= most else "fail",
        found=f"{chosen[0].runner}{with_attention} ({chosen[0].reason}): no token less likely than "
        f"a CPU's by {gap:.2g} deviations of its logits; {most:g} allowed",
        remedy=None if gap <= most else "do not serve from here",
    )


@torch.no_grad()
def behind(tokens: Sequence[int]) -> float:
    """Return by how much the logit of an answered token is below the largest one, at most, in
    standard deviations of the logits, on a CPU in fp32."""
    assert len(tokens) == PROMPT + ANSWERED, f"{len(tokens)} tokens"
    cpu = torch.device("cpu")
    choose("auto", cpu, torch.float32)
    logits = make_model("fp32", cpu).eval()(torch.tensor([tokens]))[0, PROMPT - 1 : -1]
    own = logits.gather(1, torch.tensor(tokens[PROMPT:])[:, None])[:, 0]
    return float(((logits.amax(1) - own) / logits.std(1)).max())


def speeds(device: torch.device, found: Device) -> Line:
    """Measure reading, and products in bf16 and fp8, as shares of the data sheet."""
    on_gpu = device.type == "cuda"
    side = SQUARE if on_gpu else SMALL
    ceilings = {"read": read_bandwidth(device, threads=1)}
    for kind in ("bf16", "fp8") if has_fp8(device) else ("bf16",):
        ceilings[kind] = product_flops(kind, side, side, side, device)
    spec = find_gpu_spec(found.name)
    sheet = {"read": spec.bandwidth, "bf16": spec.bf16, "fp8": spec.fp8} if spec else {}
    texts: list[str] = []
    shares: list[float] = []
    for name, rate in ceilings.items():
        peak = sheet.get(name)
        unit = "TB/s" if name == "read" else "TFLOP/s"
        text = f"{name} {rate / 1e12:.3g} {unit}"
        if peak:
            shares.append(rate / peak)
            text += f" ({rate / peak:.0%} of the data sheet)"
        texts.append(text)
    slow = bool(shares) and min(shares) < SLOW
    return Line(
        state="warn" if slow else "ok",
        found=", ".join(texts),
        remedy="is it shared, throttled, or another variant than its name says?" if slow else None,
        values=ceilings,
    )


def product_flops(
    kind: str, m: int, n: int, k: int, device: torch.device, *, fast: bool = False
) -> float:
    """Return the FLOP/s of (m, k) @ (k, n) in "bf16" or "fp8"; `fast`: with fewer bits in sums."""
    left, right = (torch.randn(side, k, device=device, dtype=torch.bfloat16) for side in (m, n))
    if kind == "bf16":
        return 2 * m * n * k / best_seconds(lambda: left @ right.T)
    unit = torch.ones((), device=device)
    a, b = left.to(E4M3), right.to(E4M3)

    def product() -> Any:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - its only name
            a, b.T, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return 2 * m * n * k / best_seconds(product)


def best_seconds(once: Callable[[], object], *, repeats: int = 20) -> float:
    """Return the seconds of one call: the best of three loops of `repeats`, after a warm-up."""
    if not torch.cuda.is_initialized():
        repeats = 1
    once()
    best = float("inf")
    for _ in range(3):
        wait_for_gpu()
        began = time.perf_counter()
        for _ in range(repeats):
            once()
        wait_for_gpu()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


if __name__ == "__main__":
    main()
