"""Answers by kernel: a decode step of each runner at several numbers of rows, and the first token.

    python -m bench.gpu.decode --device cuda --depth 20 --rows 1 8 32

Random weights. Rates through the scheduler, as answers are really made; then the kernels of more
steps, and of one prompt, by torch's profiler. The first token is measured alone, five times; also
with the prompt's operations launched one by one, where they are a CUDA graph.
"""

import argparse
import random
import statistics

import torch

from bench.gpu import profiles
from bench.gpu.profiles import Profiler
from bench.gpu.report import needs_gpu, result, say, wait_turn
from bench.gpu.trainer import make_model
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.choose import choose_runner, open_runner
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.scheduler import Scheduler
from nanochat_core.engine.speed import bytes_per_step, make_endless, time_answers
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import run_for_depth

RUNNERS = {"cuda": ("triton", "cuda graphs"), "cpu": ("native", "torch")}
TOP_K = SamplingParams(top_k=50)
TIMES = 5  # the first token
PROFILED = 30  # tokens of each answer


def main() -> None:
    """Prepare every runner, then measure each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    small = {} if on_gpu else {"vocab_size": 512, "sequence_len": 256}
    run = run_for_depth(options.depth, precision="bf16" if on_gpu else "fp32", **small)
    model = make_model(run, torch.device(options.device)).eval()
    rng = random.Random(1)
    prompt = [rng.randrange(run.model.vocab_size) for _ in range(options.prompt)]
    schedulers: dict[str, Scheduler] = {}
    lengths = {"num_slots": max(options.rows), "max_len": options.prompt + 2 * options.tokens}
    for name in RUNNERS[options.device]:
        try:
            runner = open_runner(model, stop_tokens=(), runner=name, **lengths)
        except ConfigError as error:
            say(f"{name}: {error}")
            result(f"decode {name}", unable=str(error))
            continue
        schedulers[name] = make_endless(runner, context=options.prompt + 2 * options.tokens)
        for rows in options.rows:  # kernels are compiled, graphs are captured
            answer(schedulers[name], prompt, rows, 4)
    wait_turn()
    for name, scheduler in schedulers.items():
        choice = choose_runner(model, runner=name, **lengths)
        for rows in options.rows:
            length = options.prompt + options.tokens // 2
            least = bytes_per_step(model, choice.runner, choice.precision, rows=rows, length=length)
            decode(f"{name}, {rows} rows", scheduler, prompt, rows, options.tokens, least, on_gpu)
        first_token(name, scheduler, prompt, on_gpu)
        runner = scheduler.slots.runner
        if isinstance(runner, DeviceRunner) and runner.passes is not None:
            runner.passes = None
            time_first_token(f"{name}, one by one", scheduler, prompt)
    if not on_gpu:
        needs_gpu("kernels of a decode step, and rates")


def answer(scheduler: Scheduler, prompt: list[int], rows: int, tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token of every answer, and from there to the last."""
    scheduler.forget()  # or the prompt would be cached
    return time_answers(scheduler, prompt, rows, tokens, seed=1, params=TOP_K)


def decode(
    title: str,
    scheduler: Scheduler,
    prompt: list[int],
    rows: int,
    tokens: int,
    least: int,
    on_gpu: bool,
) -> None:
    """Report the rate of so many answers, and a step's kernels; `least`: bytes that it reads."""
    rounds = [answer(scheduler, prompt, rows, tokens) for _ in range(2)]
    step = min(rest for _, rest in rounds) / (tokens - 1)
    result(
        f"decode {title}",
        tokens_per_second=rows / step,
        step_seconds=step,
        bytes_per_step=least,
        bytes_per_second=least / step,
    )
    rate = f"{rows / step:,.0f} tokens/s, {1e6 * step:,.0f} us a step"
    say(f"{title}: {rate}, {least / step / 1e12:.3f} TB/s")
    profilers: list[Profiler] = []
    steps = min(PROFILED, tokens)
    scheduler.forget()
    time_answers(
        scheduler,
        prompt,
        rows,
        steps,
        seed=2,
        params=TOP_K,
        on_first=lambda: profilers.append(Profiler(on_gpu=on_gpu)),
    )
    found = profilers[0].stop()
    result(f"profile decode {title}", steps=steps - 1, **found)
    for line in profiles.lines(f"{title}, {steps - 1} steps", found):
        say(line)


def first_token(name: str, scheduler: Scheduler, prompt: list[int], on_gpu: bool) -> None:
    """Report the time to the first token of one answer alone, and what the host does in it."""
    time_first_token(name, scheduler, prompt)
    for where, kernels in {"host": False, "kernels": True}.items():
        if kernels and not on_gpu:
            continue
        profiler = Profiler(on_gpu=kernels)
        answer(scheduler, prompt, 1, 1)
        found = profiler.stop()
        result(f"profile first token {name}, {where}", **found)
        for line in profiles.lines(f"{name}, first token, {where}", found):
            say(line)


def time_first_token(name: str, scheduler: Scheduler, prompt: list[int]) -> None:
    """Report the time to the first token of one answer alone."""
    times = [1e3 * answer(scheduler, prompt, 1, 1)[0] for _ in range(TIMES)]
    result(f"first token {name}", milliseconds=times, prompt=len(prompt))
    say(f"{name}, first token: {statistics.median(times):.2f} ms ({min(times):.2f} at best)")


if __name__ == "__main__":
    main()
