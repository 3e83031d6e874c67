"""For `nanochat doctor`: the self-test of a GPU, and what each profile would take on one."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flows.profiles import PROFILES, open_profile
from flows.render.table import Table, numbers, texts
from flows.render.text import count, duration, money, size
from infra.storage.s3.probe import Finding
from nanochat_core.roofline import most_decoded, pretraining, training_bytes
from nanochat_core.runtime.hardware.gpu_specs import PRICES_OF, GpuSpec, find_gpu_spec

SELF_TEST = (sys.executable, "-m", "nanochat_core.self_test")
TIMEOUT = 600.0  # seconds: the first time attention may be compiled
NODE = 8  # GPUs
PRECISIONS = ("bf16", "fp8")


def self_test(
    command: Sequence[str] = SELF_TEST, *, timeout: float = TIMEOUT
) -> Iterator[tuple[Finding, Mapping[str, Any]]]:
    """Yield every finding of `nanochat_core.self_test` with its values, as it comes.

    In a process of its own: a kernel that crashes is a finding too.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                tree = json.loads(line)
                values = tree.pop("values")
                yield Finding(**tree), values
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            timer.join()
        if code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no output"])[-1]
            found = f"ended with {code}: {last}"
            yield Finding(name="self-test", state="fail", found=found), {}


def measured_spec(values: Mapping[str, Any]) -> GpuSpec | None:
    """Return what is known of the tested GPU: by its name, else what was measured."""
    known = find_gpu_spec(str(values.get("gpu")))
    if known is not None:
        return dataclasses.replace(known, memory=values["memory"])
    if not {"read", "bf16"} <= values.keys():
        return None
    return GpuSpec(
        name=values["gpu"],
        bf16=values["bf16"],
        fp8=values.get("fp8"),
        bandwidth=values["read"],
        memory=values["memory"],
    )


def forecast(gpu: GpuSpec) -> list[dict[str, Any]]:
    """Return what each profile would take by the roofline, once for each precision of the GPU."""
    found: list[dict[str, Any]] = []
    for name in PROFILES:
        run = open_profile(name, snapshots=False).run
        if run.numerics.precision not in PRECISIONS:
            continue  # fp32, and so small that launches take the time
        for precision in PRECISIONS:
            if (pace := pretraining(run, gpu, precision)) is None:
                continue
            row = {"profile": name, "precision": precision, **dataclasses.asdict(pace)}
            row["dollars"] = gpu.dollars and pace.gpu_seconds / 3600 * gpu.dollars
            row["training_bytes"] = {n: training_bytes(run, n) for n in (1, NODE)}
            row["most_decoded_per_second"] = most_decoded(run, gpu)
            found.append(row)
    return found


def table(gpu: GpuSpec) -> list[str | Table]:
    """Return `forecast` for people, with what it assumes."""
    price = f"{money(gpu.dollars)} an hour ({PRICES_OF})" if gpu.dollars else "no price is known"
    rows: list[tuple[str, ...]] = []
    for row in forecast(gpu):
        times = [
            duration(row["gpu_seconds"] / number)
            if needed < gpu.memory
            else f"needs {size(round(needed))}"
            for number, needed in row["training_bytes"].items()
        ]
        speed = (count(row["tokens_per_second"]), f"{row['mfu']:.0%}")
        dollars = "" if row["dollars"] is None else money(row["dollars"])
        answers = f"{row['most_decoded_per_second']:,.0f}/s"
        rows.append((row["profile"], row["precision"], *speed, *times, dollars, answers))
    heads = ("tokens/s", "MFU", "one GPU", f"{NODE} GPUs", "cost", "answers")
    return [
        f"{gpu.name}: {gpu.bf16 / 1e12:,.0f} TFLOP/s in bf16, {gpu.bandwidth / 1e12:.3g} TB/s, "
        f"{size(round(gpu.memory))}, {price}",
        "",
        Table(columns=(*texts("profile", "in"), *numbers(*heads)), rows=rows),
        "",
        "Pretraining alone, by a roofline that was fitted to runs which nanochat published for",
        "H100s; none of it was measured with nanochat-flows. Communication, evaluation and starts",
        "are not counted. tokens/s: of one GPU. MFU: of the peak in bf16. answers: tokens of one",
        "answer, at most.",
    ]
