"""The steps of each part, in the order of their value: command, seconds, and what they pass by."""

from dataclasses import dataclass

HEAD, JANUARY = "NANOCHAT_DIR", "NANOCHAT_JAN_DIR"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A program to run."""

    name: str
    seconds: int  # that it takes on a GPU, estimated: with less left it is skipped
    program: str  # after `python`
    options: str  # of the program
    dry: str  # its options in a dry run
    passes: str  # what has to come out
    peer: str | None = None  # the variable that names a checkout that it cannot do without

    def argv(self, *, dry: bool) -> list[str]:
        """Return the command's words after `python`."""
        return [*self.program.split(), *(self.dry if dry else self.options).split()]


RIGHT = (
    Step(
        name="probe",
        seconds=35,
        program="-m bench.gpu.probe",
        options="--device cuda",
        dry="--device cpu",
        passes="figures: the ceilings that the others are compared with",
    ),
    Step(
        name="gpu tests",
        seconds=80,
        program="-m bench.gpu.gpu_tests",
        options="--workers 4",
        dry="--workers 0",
        passes="0 failed; skipped: fa3, fa4, fa2 and two GPUs at most",
    ),
    Step(
        name="smoke",
        seconds=120,
        program="-m bench.gpu.smoke",
        options="--device cuda --at-once 5",
        dry="--device cpu",
        passes="all end; losses of the attention backends within 2 %",
    ),
    Step(
        name="resume",
        seconds=110,
        program="-m bench.gpu.stages resume",
        options="--device cuda --depth 4 --steps 60",
        dry="--device cpu --depth 2 --steps 6 --ways undisturbed killed",
        passes="the same model after no stop, SIGKILL and SIGTERM",
    ),
    Step(
        name="demo",
        seconds=160,
        program="-m bench.gpu.stages demo",
        options="--device cuda",
        dry="--device cpu --depth 2 --small",
        passes="every stage ends",
    ),
)
TRAIN = (
    Step(
        name="d12 bf16",
        seconds=130,
        program="-m bench.gpu.pairs d12",
        options="",
        dry="--dry",
        passes="ratio of at least 1.15 beside HEAD with our attention",
    ),
    Step(
        name="profile",
        seconds=60,
        program="-m bench.gpu.profile_step d12",
        options="",
        dry="--dry",
        passes="the GPU busy for at least 97 % of a step",
    ),
    Step(
        name="d20 bf16",
        seconds=160,
        program="-m bench.gpu.pairs d20",
        options="",
        dry="--dry",
        passes="ratio of at least 1.10",
    ),
    Step(
        name="checkpoint",
        seconds=60,
        program="bench/checkpoint.py",
        options="--device cuda --depth 24 --precision bf16 --rows 4 "
        "--sequence-len 2048 --steps 20 --saves 2",
        dry="--depth 2 --sequence-len 64 --vocab-size 512 --steps 4 --saves 2 --threads 1",
        passes="less than 0.3 % of the time at a save a minute",
    ),
    Step(
        name="kernels",
        seconds=60,
        program="-m bench.gpu.kernels",
        options="--device cuda --depth 24",
        dry="--device cpu --depth 2",
        passes="errors beside float64: 1 % in bf16, 10 % in fp8",
    ),
    Step(
        name="attention",
        seconds=50,
        program="bench/attention.py",
        options="--depths 12 24 --rows 16 --seconds 0.5 --references",
        dry="--depths 1 --rows 1 --sequence-len 256 --seconds 0.01 --references",
        passes="errors of at most 2 % of the largest value, beside fp32",
    ),
)
USE = (
    Step(
        name="decode",
        seconds=100,
        program="bench/infer.py",
        options="--device cuda --depths 20 --batch-sizes 1 8 32 128 "
        "--prompts 512 --tokens 64 --rounds 2 --sides graphs:bf16 triton:bf16",
        dry="--depths 2 --batch-sizes 1 --prompts 16 --tokens 4 --rounds 1 --sides torch:fp32",
        passes="at least 6 times HEAD at one answer",
        peer=HEAD,
    ),
    Step(
        name="prefill",
        seconds=30,
        program="bench/infer.py",
        options="--device cuda --depths 20 --batch-sizes 1 --prompts 2040 "
        "--tokens 8 --rounds 3 --sides graphs:bf16",
        dry="--depths 2 --batch-sizes 1 --prompts 64 --tokens 4 --rounds 1 --sides torch:fp32",
        passes="first token no later than HEAD's",
        peer=HEAD,
    ),
    Step(
        name="learning",
        seconds=120,
        program="bench/parity.py",
        options="--device cuda --depth 6 --seeds 1 --steps 300 --rows 128 "
        "--precisions bf16 fp8 --threads 4",
        dry="--depth 2 --seeds 1 --steps 2 --rows 1 --precisions fp32 --tolerance 1 --small-text",
        passes="bits per byte at most 0.5 % above HEAD's; fp8 within 0.5 % of bf16",
        peer=HEAD,
    ),
    Step(
        name="serving",
        seconds=80,
        program="bench/serve.py",
        options="--device cuda --depth 20 --precision bf16 --clients 64 "
        "--peer-clients 8 --tokens 64 --rounds 1",
        dry="--depth 2 --clients 2 --tokens 4 --rounds 1",
        passes="figures: tokens/s, first token p50 and p99, /health under load",
    ),
    Step(
        name="core",
        seconds=70,
        program="bench/eval.py",
        options="--device cuda --depth 20 --core 28 --categorical 64 "
        "--generative 16 --rounds 1 --precisions bf16 --peer-dtype bfloat16",
        dry="--depth 2 --core 1 --categorical 1 --generative 1 --new-tokens 2 --rounds 1 "
        "--precisions fp32",
        passes="equal answers, ties aside",
    ),
    Step(
        name="rollouts",
        seconds=50,
        program="bench/rl.py",
        options="--device cuda --depth 12 --cases ragged --rounds 1",
        dry="--depth 2 --prompts 2 --samples 2 --ragged-tokens 8 --cases ragged --rounds 1",
        passes="figures: useful tokens/s beside HEAD, ms of a refresh",
    ),
)
DEEP = (
    Step(
        name="resume compiled",
        seconds=200,
        program="-m bench.gpu.stages resume",
        options="--device cuda --depth 4 --steps 60 --compile",
        dry="--device cpu --depth 2 --steps 1 --ways undisturbed",
        passes="the same model after no stop, SIGKILL and SIGTERM",
    ),
    Step(
        name="d24 fp8",
        seconds=400,
        program="-m bench.gpu.pairs d24-fp8",
        options="",
        dry="--dry",
        passes="ratio of at least 1.25",
    ),
    Step(
        name="profile d24",
        seconds=400,
        program="-m bench.gpu.profile_step d24-fp8 d24-fp8-bound",
        options="",
        dry="--dry",
        passes="the GPU busy for at least 97 % of a step",
    ),
    Step(
        name="levers",
        seconds=150,
        program="-m bench.gpu.pairs levers --peers",
        options="--levers qk_kernel autotune bound fast",
        dry="--levers qk_kernel fast --dry",
        passes="worth it: a ratio below 0.99, if a longer training's loss is equal",
    ),
    Step(
        name="d12 as shipped",
        seconds=110,
        program="-m bench.gpu.pairs",
        options="d12 --peers shipped L",
        dry="d12 --peers shipped L --dry",
        passes="figures: HEAD as shipped, and with --window-pattern L",
        peer=HEAD,
    ),
)
PARTS = {"right": RIGHT, "train": TRAIN, "use": USE, "deep": DEEP}
