"""What data costs beside nanochat's loader: CPU for reading, for tokenising, for packing. And what
its packing loses, by the length of a document, beside ours.

    NANOCHAT_DIR=/path/to/nanochat python bench/data.py [--seconds 10]

Both sides get the same text (docstrings of the packages installed here), the same vocabulary and
the same row length, in the same run. Everything is CPU time, of all threads and processes: it is
what reading takes away from whatever else the machine does. Packing is a function of lengths alone,
so what it loses is reported for drawn lengths too, which are long like web text: software is
documented in short pieces.
"""

import argparse
import base64
import itertools
import json
import os
import random
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
from nanochat_core.data import tokens as tokens_stage
from nanochat_core.data.packing import BATCH_DOCUMENTS, POLICIES, Row, batches, pack
from nanochat_core.data.row_files import Rows
from nanochat_core.data.shard_files import ShardSet, read_batches
from nanochat_core.data.token_files import TokenSet
from nanochat_core.job import Job, Resources
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.train import tokenizer as tokenizer_stage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is started by its path

from bench.package_text import package_text

ROWS_PER_BATCH = 8
SEQUENCE_LEN = 2048
VOCAB = 2048
LENGTH_BOUNDS = (512, 2049, 4096, 8192)  # tokens; 2049 fill a row
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
        losses = {
            "docstrings": losing(arriving_batches(made["tokens"])),
            "drawn": losing(drawn_batches()),
        }
        checkout = os.environ.get("NANOCHAT_DIR")
        if checkout is None:
            print("the peer is skipped: NANOCHAT_DIR names no checkout of nanochat")
            theirs: dict[str, float] = {}
        else:
            theirs = peer(Path(checkout), Path(directory), made, options.seconds)
    report(ours, theirs)
    report_losses(losses)
    print(json.dumps({"ours": ours, "theirs": theirs, "losses": losses}))


def prepare(directory: Path) -> dict[str, Path]:
    """Stages shards to rows of the tiny profile, with other text, rows and vocabulary: -> files."""
    text = package_text(directory / "text")
    run = open_profile("tiny", overrides=text).run
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
        "tokenizer": replace(run.tokenizer, vocab_size=VOCAB).tree(),
        "rows": replace(run.rows, sequence_len=SEQUENCE_LEN).tree(),
    }


def reading(made: dict[str, Path], seconds: float) -> float:
    """CPU seconds per million training tokens, from rows on disk to tensors, u16 as they travel."""
    import torch

    rows = Rows.open(made["rows"], "train")
    step = 0

    def one_batch() -> int:
        nonlocal step
        tensor = torch.from_numpy(rows.batch(step, ROWS_PER_BATCH, seed=1))
        step += 1
        return tensor.shape[0] * SEQUENCE_LEN

    return 1e6 / tokens_per_cpu_second(one_batch, seconds)


def tokenising(made: dict[str, Path], seconds: float) -> float:
    """Tokens per CPU second, as each process of the stage does it."""
    tokenizer = Tokenizer.load(made["tokenizer"])
    groups = endless(lambda: read_batches(ShardSet.open(made["shards"]).train[0]))

    def one_group() -> int:
        return sum(map(len, tokenizer.encode_batch(next(groups))))

    return tokens_per_cpu_second(one_group, seconds)


def packing(made: dict[str, Path], seconds: float) -> float:
    """Tokens per CPU second that the default policy places, from document lengths to rows."""
    arriving = arriving_batches(made["tokens"])

    def one_pass() -> int:
        return SEQUENCE_LEN * sum(1 for _ in packed(arriving, "default"))

    return tokens_per_cpu_second(one_pass, seconds)


def packed(arriving: list[list[int]], policy: str) -> Iterator[Row]:
    """Rows of these documents, as the stage packs them."""
    return pack(arriving, row_len=SEQUENCE_LEN + 1, policy=policy, buffer_documents=1000)


def arriving_batches(directory: Path) -> list[list[int]]:
    """Lengths of the training documents, in the batches in which they arrive."""
    tokens = TokenSet.open(directory)
    arriving: list[list[int]] = []
    for shard in tokens.shards[:-1]:
        lengths, start = tokens.read_lengths(shard).tolist(), 0
        for size in batches(shard.row_groups):
            arriving.append(lengths[start : start + size])
            start += size
    return arriving


def drawn_batches() -> list[list[int]]:
    """Lengths of 100,000 documents, half of them below 490 tokens and one in 13 above 2049."""
    draw = random.Random(1)
    lengths = [max(2, int(draw.lognormvariate(6.2, 1.0))) for _ in range(100_000)]
    return [lengths[i : i + BATCH_DOCUMENTS] for i in range(0, len(lengths), BATCH_DOCUMENTS)]


def losing(arriving: list[list[int]]) -> dict[str, dict[str, float]]:
    """policy -> what is trained on: of all tokens, of each class of lengths, and of documents."""
    lengths = [length for batch in arriving for length in batch]
    found: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        placed = [0] * len(lengths)
        for row in packed(arriving, policy):
            for segment in row:
                placed[segment.document] += segment.length
        shares = {"all": sum(placed) / sum(lengths)}
        bounds = (0, *LENGTH_BOUNDS, max(lengths))
        for low, high in itertools.pairwise(bounds):
            its = [i for i, length in enumerate(lengths) if low < length <= high]
            if its:
                total = sum(lengths[i] for i in its)
                shares[f"{low + 1}-{high}"] = sum(placed[i] for i in its) / total
        shares["documents in no row"] = sum(1 for share in placed if not share) / len(placed)
        found[policy] = shares
    return found


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
    groups = endless(lambda: read_batches(ShardSet.open(made["shards"]).train[0]))

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

    lines = (directory / "tokenizer.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
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


def report_losses(losses: dict[str, dict[str, dict[str, float]]]) -> None:
    """For each set of documents and policy, the share of tokens in rows."""
    for documents, policies in losses.items():
        print(f"{documents}: share of tokens trained on, by tokens of the document")
        for policy, shares in policies.items():
            cells = "  ".join(f"{name} {share:.4f}" for name, share in shares.items())
            print(f"  {policy:<9} {cells}")


if __name__ == "__main__":
    main()
