"""What data costs beside nanochat's loader: CPU for reading, for tokenising, for packing.

    NANOCHAT_DIR=/path/to/nanochat python bench/data.py [--seconds 10]

Both sides get the same text (docstrings of the packages installed here), the same vocabulary and
the same row length, in the same run. Everything is CPU time, of all threads and processes: it is
what reading takes away from whatever else the machine does.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.profiles import open_profile
from nanochat_core.config import RunConfig
from nanochat_core.data import rows as rows_stage
from nanochat_core.data import shards as shards_stage
from nanochat_core.data import tokenize as tokens_stage
from nanochat_core.data.packing import batches, pack
from nanochat_core.data.row_files import Rows
from nanochat_core.data.shard_files import ShardSet, read_row_groups
from nanochat_core.data.token_files import TokenSet
from nanochat_core.job import Job, Resources
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.train import tokenizer as tokenizer_stage

ROWS_PER_BATCH = 8
SEQUENCE_LEN = 2048
RESOURCES = Resources(
    device="cpu",
    threads=1,
    device_batch_size=1,
    save_every_seconds=60.0,
    eval_every_steps=0,
    dollars_per_hour=0.0,
)


def main() -> None:
    """Measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description="What data costs, beside nanochat's loader.")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as directory:
        made = prepare(Path(directory))
        ours = {
            "reading": reading(made, options.seconds),
            "tokenising": tokenising(made, options.seconds),
            "packing": packing(made, options.seconds),
        }
        checkout = os.environ.get("NANOCHAT_DIR")
        if checkout is None:
            print("the peer is skipped: NANOCHAT_DIR names no checkout of nanochat")
            theirs: dict[str, float] = {}
        else:
            theirs = peer(Path(checkout), Path(directory), made, options.seconds)
    report(ours, theirs)


def prepare(directory: Path) -> dict[str, Path]:
    """Stages shards to rows of the tiny profile, with rows of 2048: stage -> its files."""
    run = open_profile("tiny").run
    stages: tuple[tuple[str, Callable[[Job], Any], tuple[str, ...]], ...] = (
        ("shards", shards_stage.run, ()),
        ("tokenizer", tokenizer_stage.run, ("shards",)),
        ("tokens", tokens_stage.run, ("shards", "tokenizer")),
        ("rows", rows_stage.run, ("tokens",)),
    )
    made: dict[str, Path] = {}
    for name, work, inputs in stages:
        job = Job(
            directory=directory / name,
            stage=name,
            entry=name,
            fingerprint="bench",
            config=_sections(run),
            inputs={source: made[source] for source in inputs},
            resources=RESOURCES,
        )
        job.output.mkdir(parents=True)
        work(job)
        made[name] = job.output
    return made


def _sections(run: RunConfig) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "shards": run.shards.tree(),
        "tokenizer": run.tokenizer.tree(),
        "rows": replace(run.rows, sequence_len=SEQUENCE_LEN).tree(),
    }


def reading(made: dict[str, Path], seconds: float) -> float:
    """CPU seconds per million training tokens, from rows on disk to tensors."""
    import torch

    rows = Rows.open(made["rows"], "train")
    step = 0

    def one_batch() -> int:
        nonlocal step
        tensor = torch.from_numpy(rows.batch(step, ROWS_PER_BATCH, seed=1)).long()
        step += 1
        return tensor.shape[0] * SEQUENCE_LEN

    return 1e6 / tokens_per_cpu_second(one_batch, seconds)


def tokenising(made: dict[str, Path], seconds: float) -> float:
    """Tokens per CPU second, as each process of the stage does it."""
    tokenizer = Tokenizer.load(made["tokenizer"])
    groups = endless(lambda: read_row_groups(ShardSet.open(made["shards"]).train[0]))

    def one_group() -> int:
        return sum(map(len, tokenizer.encode_batch(next(groups))))

    return tokens_per_cpu_second(one_group, seconds)


def packing(made: dict[str, Path], seconds: float) -> float:
    """Tokens per CPU second that the default policy places, from document lengths to rows."""
    tokens = TokenSet.open(made["tokens"])
    arriving: list[list[int]] = []
    for shard in tokens.shards[:-1]:
        lengths, start = tokens.read_lengths(shard).tolist(), 0
        for size in batches(shard.row_groups):
            arriving.append(lengths[start : start + size])
            start += size

    def one_pass() -> int:
        packed = pack(arriving, row_len=SEQUENCE_LEN + 1, policy="default", buffer_documents=1000)
        return sum(SEQUENCE_LEN + 1 for _ in packed)

    return tokens_per_cpu_second(one_pass, seconds)


def peer(
    checkout: Path, directory: Path, made: dict[str, Path], seconds: float
) -> dict[str, float]:
    """The same of nanochat's own loader and tokenizer."""
    base = directory / "nanochat"
    base.mkdir()
    (base / "base_data_climbmix").symlink_to(made["shards"])
    os.environ["NANOCHAT_BASE_DIR"] = str(base)
    sys.path.insert(0, str(checkout))
    # The peer's checkout is not a package of ours: nothing can be said of its types.
    import nanochat.dataloader as dataloader  # pyright: ignore[reportMissingImports]
    import nanochat.tokenizer as peer_tokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = peer_tokenizer.RustBPETokenizer(_encoding(made["tokenizer"]), "<|bos|>")
    loader = dataloader.tokenizing_distributed_data_loader_bos_bestfit(
        tokenizer, ROWS_PER_BATCH, SEQUENCE_LEN, "train", device="cpu"
    )
    groups = endless(lambda: read_row_groups(ShardSet.open(made["shards"]).train[0]))

    def one_batch() -> int:
        next(loader)
        return ROWS_PER_BATCH * SEQUENCE_LEN

    def one_group() -> int:
        return sum(map(len, tokenizer.encode(next(groups), num_threads=4)))

    return {
        "reading": 1e6 / tokens_per_cpu_second(one_batch, seconds),
        "tokenising": tokens_per_cpu_second(one_group, seconds),
    }


def _encoding(directory: Path) -> Any:
    """Our vocabulary as the encoding that nanochat's tokenizer wraps."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(directory / "tokenizer.tiktoken"))
    settings = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    return tiktoken.Encoding(
        name="peer",
        pat_str=settings["pattern"],
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)},
    )


def tokens_per_cpu_second(work: Callable[[], int], seconds: float) -> float:
    """Repeat `work`, which returns the tokens it did, for `seconds` after a first time."""
    work()
    tokens, before, started = 0, cpu_seconds(), time.monotonic()
    while time.monotonic() - started < seconds:
        tokens += work()
    return tokens / (cpu_seconds() - before)


def cpu_seconds() -> float:
    """User and system time of this process, its threads, and its children."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in times)


def endless(make: Callable[[], Iterator[list[str]]]) -> Iterator[list[str]]:
    """Row groups, again and again."""
    while True:
        yield from make()


def report(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Ratios above 1: we need less CPU."""
    units = {
        "reading": "CPU s per million training tokens",
        "tokenising": "tokens per CPU s",
        "packing": "tokens per CPU s",
    }
    for name, value in ours.items():
        other = theirs.get(name)
        line = f"{name:<11} {value:>14,.4g} {units[name]}"
        if other is not None:
            ratio = other / value if name == "reading" else value / other
            line += f"; nanochat {other:,.4g}; {ratio:,.1f}x"
        print(line)
    print(json.dumps({"ours": ours, "theirs": theirs}))


if __name__ == "__main__":
    main()
