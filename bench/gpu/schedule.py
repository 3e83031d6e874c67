"""The steps of the schedule, in order of their value: command, hard end, and what they pass by.

A step first prepares itself (it compiles, beside others), then it has the GPU alone. `seconds` is
the hard end of the second part, `ready` of the first. The first twelve are the quarter of an hour;
those after them come where more minutes are given, or are left.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

HEAD, JANUARY = "NANOCHAT_DIR", "NANOCHAT_JAN_DIR"
MARGIN = 5.0  # seconds before the end of all, in which programs are ended and results written


@dataclass(frozen=True, kw_only=True)
class Step:
    """A program to run."""

    name: str
    seconds: int  # its hard end, from the moment when it has the GPU
    program: str  # after `python`
    options: str  # of the program
    dry: str  # its options on a CPU
    passes: str  # what has to come out
    ready: int = 0  # the hard end of its preparation, seconds; 0: it begins with its turn
    cores: int = 1  # that preparing takes
    gigabytes: int = 10  # of the GPU's memory, from its start
    quiet: bool = True  # the preparation of other steps is stopped meanwhile
    peer: str | None = None  # the variable that names a checkout that it cannot do without

    def argv(self, *, dry: bool) -> list[str]:
        """Return the command's words after `python`."""
        return [*self.program.split(), *(self.dry if dry else self.options).split()]

    def missing(self) -> str | None:
        """Return why it cannot run; None if it can."""
        if self.peer is None or self.peer in os.environ:
            return None
        return f"{self.peer} names no checkout of nanochat"


QUARTER = (
    Step(
        name="d12",
        seconds=75,
        ready=150,
        cores=8,
        gigabytes=68,
        program="-m bench.gpu.pairs d12",
        options="--levers qk_kernel blocks --steps 4 --profile --ready 140",
        dry="--levers qk_kernel blocks --profile --dry",
        passes="1.15 times HEAD with our attention; kernels of both sides by class",
    ),
    Step(
        name="products",
        seconds=30,
        ready=60,
        quiet=False,
        program="-m bench.gpu.probe",
        options="--device cuda",
        dry="--device cpu",
        passes="figures: bandwidth, every product of a training step, both of its gradients",
    ),
    Step(
        name="decode",
        seconds=75,
        ready=120,
        cores=2,
        gigabytes=8,
        program="-m bench.gpu.decode",
        options="--device cuda --depth 20 --rows 1 8 32",
        dry="--device cpu --depth 2 --rows 1 2 --tokens 4 --prompt 16",
        passes="figures: a step by kernel, rates, the first token alone",
    ),
    Step(
        name="slice",
        seconds=50,
        ready=200,
        cores=6,
        gigabytes=42,
        program="-m bench.gpu.pairs slice",
        options="--levers bound --rounds 3 --steps 4 --profile --ready 190",
        dry="--levers bound --profile --dry",
        passes="1.25 times HEAD in fp8 at width 1,536; kernels of both sides by class",
    ),
    Step(
        name="training",
        seconds=300,
        ready=300,
        cores=4,
        gigabytes=14,
        quiet=False,
        program="-m bench.gpu.pipeline training",
        options="--device cuda --depth 10 --steps 400",
        dry="--device cpu --depth 1 --steps 4 --small",
        passes="every stage ends, SFT is killed once and resumes; questions after it 90 %",
    ),
    Step(
        name="gpu tests",
        seconds=90,
        quiet=False,
        program="-m bench.gpu.gpu_tests",
        options="--workers 3",
        dry="--workers 0",
        passes="0 failed; skipped: fa2, fa3, fa4, two GPUs at most",
    ),
    Step(
        name="attention",
        seconds=45,
        program="bench/attention.py",
        options="--depths 12 24 --rows 16 --seconds 0.5 --references",
        dry="--depths 1 --rows 1 --sequence-len 256 --seconds 0.01 --references",
        passes="FA3, FA4 and cuDNN side by side; errors of at most 2 % beside fp32",
    ),
    Step(
        name="slice knobs",
        seconds=40,
        ready=200,
        cores=4,
        gigabytes=42,
        program="-m bench.gpu.pairs slice",
        options="--peers --levers fast autotune --ready 190",
        dry="--peers --levers fast autotune --dry",
        passes="worth it: a ratio below 0.99, if a longer training's loss is equal",
    ),
    Step(
        name="d12 knobs",
        seconds=40,
        ready=200,
        cores=4,
        gigabytes=52,
        program="-m bench.gpu.pairs d12",
        options="--peers --levers weight_kernel autotune --steps 4 --ready 190",
        dry="--peers --levers weight_kernel autotune --dry",
        passes="worth it: a ratio below 0.99",
    ),
    Step(
        name="d12 rows",
        seconds=20,
        ready=100,
        cores=2,
        gigabytes=52,
        program="-m bench.gpu.pairs d12",
        options="--peers --levers rows --steps 4 --rounds 1 --ready 90",
        dry="--peers --levers rows --dry",
        passes="figures: as many tokens in half as many micro-steps",
    ),
    Step(
        name="kernels",
        seconds=60,
        program="-m bench.gpu.kernels",
        options="--device cuda --depth 24",
        dry="--device cpu --depth 2",
        passes="errors beside float64: 1 % in bf16, 10 % in fp8; the optimizer's step",
    ),
    Step(
        name="memory",
        seconds=60,
        program="bench/checkpoint.py",
        options="--device cuda --depth 24 --precision bf16 --rows 4 "
        "--sequence-len 2048 --steps 20 --saves 2",
        dry="--depth 2 --sequence-len 64 --vocab-size 512 --steps 4 --saves 2 --threads 1",
        passes="a save of depth 24: less than 0.3 % of the time at one a minute, pinned memory",
    ),
)
MORE = (
    Step(
        name="answers",
        seconds=100,
        program="bench/infer.py",
        options="--device cuda --depths 20 --batch-sizes 1 8 32 128 "
        "--prompts 512 --tokens 64 --rounds 2 --sides graphs:bf16 triton:bf16",
        dry="--depths 2 --batch-sizes 1 --prompts 16 --tokens 4 --rounds 1 --sides torch:fp32",
        passes="at least 6 times HEAD at one answer",
        peer=HEAD,
    ),
    Step(
        name="smoke",
        seconds=150,
        program="-m bench.gpu.smoke",
        options="--device cuda --at-once 5",
        dry="--device cpu",
        passes="all end; losses of the attention backends within 2 %",
    ),
    Step(
        name="resume",
        seconds=200,
        program="-m bench.gpu.pipeline resume",
        options="--device cuda --depth 4 --steps 60 --compile",
        dry="--device cpu --depth 2 --steps 6 --ways undisturbed killed",
        passes="the same model, compiled, after no stop, SIGKILL and SIGTERM",
    ),
    Step(
        name="learning",
        seconds=150,
        program="bench/parity.py",
        options="--device cuda --depth 6 --seeds 1 --steps 300 --rows 128 "
        "--precisions bf16 fp8 --threads 4",
        dry="--depth 2 --seeds 1 --steps 2 --rows 1 --precisions fp32 --tolerance 1 --small-text",
        passes="bits per byte at most 0.5 % above HEAD's; fp8 within 0.5 % of bf16",
        peer=HEAD,
    ),
    Step(
        name="d20",
        seconds=80,
        ready=240,
        cores=4,
        gigabytes=70,
        program="-m bench.gpu.pairs d20",
        options="--ready 230",
        dry="--dry",
        passes="ratio of at least 1.10",
    ),
    Step(
        name="d12 as shipped",
        seconds=60,
        ready=200,
        cores=6,
        gigabytes=52,
        program="-m bench.gpu.pairs d12",
        options="--peers shipped L --ready 190",
        dry="--peers shipped L --dry",
        passes="figures: HEAD as shipped, and with --window-pattern L",
        peer=HEAD,
    ),
    Step(
        name="rollouts",
        seconds=80,
        program="bench/rl.py",
        options="--device cuda --depth 12 --cases ragged --rounds 1",
        dry="--depth 2 --prompts 2 --samples 2 --ragged-tokens 8 --cases ragged --rounds 1",
        passes="figures: useful tokens/s beside HEAD, ms of a refresh",
    ),
    Step(
        name="core",
        seconds=100,
        program="bench/eval.py",
        options="--device cuda --depth 20 --core 28 --categorical 64 "
        "--generative 16 --rounds 1 --precisions bf16 --peer-dtype bfloat16",
        dry="--depth 2 --core 1 --categorical 1 --generative 1 --new-tokens 2 --rounds 1 "
        "--precisions fp32",
        passes="equal answers, ties aside",
    ),
    Step(
        name="serving",
        seconds=120,
        program="bench/serve.py",
        options="--device cuda --depth 20 --precision bf16 --clients 64 "
        "--peer-clients 8 --tokens 64 --rounds 1",
        dry="--depth 2 --clients 2 --tokens 4 --rounds 1",
        passes="figures: tokens/s, first token p50 and p99, /health under load",
    ),
)
STEPS = (*QUARTER, *MORE)


def fitting(steps: Iterable[tuple[Step, float]], seconds: float) -> list[Step]:
    """Return the steps that surely end within `seconds`: in order of value each that still fits.

    steps: each with the seconds that it may still take.
    """
    room, found = seconds - MARGIN, list[Step]()
    for step, left in steps:
        if left <= room:
            room -= left
            found.append(step)
    return found
