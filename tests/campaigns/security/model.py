"""Mutated model directories: each gives a one-line error or the right answer.

A child process tries many of them, under limits of memory and time, and says before each which one
it is: one that ends the child by a signal is named, and the next child continues after it.
"""

import json
import os
import random
import resource
import shutil
import signal
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nanochat_core.config import ModelConfig
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.native import build
from nanochat_core.eras import numerics
from nanochat_core.errors import NanochatError
from nanochat_core.model.checkpoint import load_model, load_state, save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from tests.campaigns.security.records import change

Trial: TypeAlias = Callable[[Path, random.Random], None]

SECONDS = 30  # of one mutant, on a machine that is busy
MEMORY = 2**31  # bytes of address space that a child may take for its mutants
ENGINE_MEMORY = 2**27
MAX_CHARACTERS = 600  # of an error
TEXT = "hello 12"
FILES = (
    *("model.safetensors", "optimizer.safetensors"),
    *("config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer.tiktoken"),
)
COUNTS = [0, 1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 25, 31, 32, 33, 64, 65, 100, 512, 2**12, 2**16]
HUGE = [2**20, 2**20 + 1, 2**24, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 10**30]
ODD = [None, True, False, "", "32", "bf16", "fp8", "int8", [], {}, [32, 32, 32], [[[]]], {"a": 1}]
NUMBERS = [0.5, -0.5, 1e-30, 1e-300, 1e30, 1e300, -1e30, 5e-324, 15.0, 1e5]
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]
DTYPES = ("F64", "F32", "BF16", "F16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "C64", "X")
PATTERNS = ["", "(", "(a+)+$", "(?=)", ".", r"[\s\S]", r"\p{Nope}", "(x{999}){999}", "\x00", "(?i"]


def write_models(folder: Path) -> list[Path]:
    """Write the models that are mutated: with all parts and with few, in fp32 and in bf16."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258}
    tokenizer = Tokenizer(ranks)
    found: list[Path] = []
    kinds = (("all", "fp32", True), ("few", "fp32", False), ("bf16", "bf16", True))
    for name, precision, has_parts in kinds:
        directory = folder / name
        (directory / "tokenizer").mkdir(parents=True)
        tokenizer.save(directory / "tokenizer")
        config = ModelConfig(
            depth=3,
            width=32,
            num_heads=4,
            num_kv_heads=2,
            sequence_len=64,
            vocab_size=len(ranks) + len(SPECIAL_TOKENS),
            windows=(16, 16, 64),
            value_embeds=has_parts,
            smear=has_parts,
            backout=has_parts,
        )
        gpt = GPT(config, numerics(precision))
        gpt.init_weights(0)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(7))
        save_model(
            directory,
            gpt,
            tokenizer=directory / "tokenizer",
            optimizer={"exp_avg/lm_head.weight": torch.zeros(4, 4)},
            made_by="test",
        )
        found.append(directory)
    return found


def mutate(directory: Path, rng: random.Random) -> str:
    """Change a model directory in one to three places; return what was done."""
    done: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice((*FILES, "config.json", "config.json", "model.safetensors"))
        path = directory / name
        if not path.exists():  # it was removed before
            continue
        change_text = _CHANGES[path.suffix] if rng.random() < 0.8 else _damage
        data = bytearray(path.read_bytes())
        try:
            done.append(f"{name}: {change_text(data, rng)}")
        except (ValueError, LookupError, struct.error, RecursionError, AttributeError, TypeError):
            done.append(f"{name}: was spoilt before")
            continue
        path.write_bytes(data)
        if rng.random() < 0.02:
            done.append("gone")
            path.unlink()
    return "; ".join(done)


def _damage(data: bytearray, rng: random.Random) -> str:
    """Spoil the bytes of any file."""
    kind = rng.choice(("truncated", "bytes changed", "filled", "emptied", "doubled", "nested"))
    place = rng.randrange(len(data) + 1)
    if kind == "truncated":
        del data[place:]
    elif kind == "bytes changed" and data:
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "filled":  # the bytes of numbers that are none, of infinity, of large ones
        filler = rng.choice((b"\xff", b"\x00\x00\x80\x7f", b"\x7f", rng.randbytes(64)))
        data[place : place + 4096] = (filler * 4096)[: min(4096, len(data) - place)]
    elif kind == "emptied":
        data.clear()
    elif kind == "doubled":
        data *= 2
    elif kind == "nested":
        data[:] = b"[" * 100_000
    return kind


def _value(rng: random.Random, old: Any) -> Any:
    """Return a value to put in place of another."""
    if isinstance(old, bool) and rng.random() < 0.5:
        return not old
    if isinstance(old, int | float) and rng.random() < 0.3:
        return rng.choice((-old, old + 1, old - 1, old * 2, old // 2, str(old), [old], float(old)))
    if isinstance(old, list) and rng.random() < 0.5:
        return rng.choice((old + old, old[1:], old[::-1], [*old, 1], old * 400))
    if isinstance(old, str) and rng.random() < 0.5:
        words = ("fp32", "compute", "line\nbreak", "\x1b[31m", "a" * 5000)
        return rng.choice((*PATTERNS, *DTYPES, *words))
    return rng.choice(rng.choice((COUNTS, HUGE, ODD, NUMBERS, NOT_NUMBERS, [-c for c in COUNTS])))


def _change_json(data: bytearray, rng: random.Random) -> str:
    """Change, remove or add a setting."""
    tree = json.loads(data)
    what = change(tree, rng, lambda old: _value(rng, old))
    data[:] = json.dumps(tree).encode()
    return what


def _change_tensors(data: bytearray, rng: random.Random) -> str:
    """Change what a safetensors header says of a tensor, its name, or which tensor it names."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name, other = (rng.choice(sorted(header)) for _ in "ab")
    what = f"{name} and {other} swapped"
    if rng.random() < 0.7:
        what = change(header, rng, lambda old: _value(rng, old))
    elif rng.random() < 0.5:
        header[name], header[other] = header[other], header[name]
    else:
        new = rng.choice((other, "a\nb", "\x1b[2J", name + ".weight", "n" * 5000))
        header[new], what = header.pop(name), f"{name} renamed"
    text = json.dumps(header).encode()
    length = len(text)
    if rng.random() < 0.05:
        length = rng.choice((0, 1, length - 1, length + 1, 2**40, 2**63))
    data[:] = struct.pack("<Q", length) + text + body
    return what


def _change_ranks(data: bytearray, rng: random.Random) -> str:
    """Change a line of the tokenizer's table."""
    lines = data.splitlines()
    place = rng.randrange(len(lines))
    token, _, rank = lines[place].partition(b" ")
    ranks = (b"-1", b"0", b"257", b"9" * 30, b"9" * 5000, b"1.5", b"x", b"1 2", b"1_0", b"")
    tokens = (b"", b"A", b"////", b"AA==", b"\xff")
    another = (token + b" " + rng.choice(ranks), rng.choice(tokens) + b" " + rank)
    lines[place] = rng.choice((*another, b"", rng.choice(lines)))
    data[:] = b"\n".join(lines) + b"\n"
    return f"line {place} is {bytes(lines[place])[:40]}"


_CHANGES: dict[str, Callable[[bytearray, random.Random], str]] = {
    ".json": _change_json,
    ".safetensors": _change_tensors,
    ".tiktoken": _change_ranks,
}


def answer(directory: Path, rng: random.Random) -> None:
    """Load a model and let it answer as a server would; AssertionError for a wrong answer."""
    if rng.random() < 0.1:
        load_state(directory)
    model = load_model(directory, torch.device("cpu"))
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(model.config.vocab_size)
    native = build.unable_here() is None and rng.random() < 0.8
    precision = rng.choice(("fp32", "fp32", "bf16", "int8")) if native else "fp32"
    engine = Engine(
        model,
        tokenizer,
        precision=precision,
        num_slots=2,
        memory=ENGINE_MEMORY,
        runner="native" if native else "torch",
    )
    prompt = [tokenizer.bos, *tokenizer.encode(TEXT)]
    for temperature in (0.0, 1.0):
        [tokens], _ = engine.generate_batch(prompt, max_tokens=4, temperature=temperature)
        assert all(0 <= token < model.config.vocab_size for token in tokens), tokens
        if temperature == 0.0 and precision == "fp32" and len(tokens) > len(prompt):
            _check_likeliest(model, prompt, tokens[len(prompt)])
    tokenizer.decode(tokens)


@torch.no_grad()
def _check_likeliest(model: GPT, prompt: list[int], token: int) -> None:
    """Hold the token against the model's own forward pass in fp32.

    Not where weights are no numbers, or so large that the order of sums decides.
    """
    if model.dtype != torch.float32 or not all(p.abs().amax() <= 1e4 for p in model.parameters()):
        return
    logits = model(torch.tensor([prompt]))[0, -1].double()
    if logits.isfinite().all():
        short = float(logits.max() - logits[token])
        assert short <= 1e-2 * float(logits.abs().max()) + 1e-6, f"{short} below the likeliest"


def outcome(directory: Path, rng: random.Random, trial: Trial) -> str:
    """Return what is wrong with how a mutant was taken; "" for nothing."""
    try:
        trial(directory, rng)
    except NanochatError as error:
        text = str(error)
        if not text or not text.isprintable() or len(text) > MAX_CHARACTERS:
            return f"an error of {len(text)} characters, not one line: {text!r:.200}"
    except BaseException as error:  # noqa: BLE001 - a compiled library's panic is no Exception
        return f"{type(error).__name__}: {error!s:.200}"
    return ""


def try_all(
    folder: Path, *, attempts: int, seed: int, trial: Trial = answer, seconds: float = SECONDS
) -> list[str]:
    """Try that many mutants in child processes; return a line for each that got through."""
    torch.set_num_threads(1)  # no thread of torch's may be alive in a fork
    bases, log = write_models(folder), folder / "log"
    through: list[str] = []
    begun = 0
    while begun < attempts:
        log.write_text("")
        child = os.fork()
        if child == 0:
            try:
                _try_some(folder, bases, range(begun, attempts), seed, trial, seconds)
            except BaseException:  # noqa: BLE001 - a child must not return into its parent's code
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        through += [f"{seed}/{n}: {what}: {wrong}" for n, what, wrong in lines if wrong]
        begun, what, wrong = lines[-1]
        if wrong is None:
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "itself"
            through.append(f"{seed}/{begun}: {what}: ended the process by {how}")
        begun += 1
    return through


def _try_some(
    folder: Path, bases: list[Path], numbers: range, seed: int, trial: Trial, seconds: float
) -> None:
    """Try mutants until one ends this process; log each before and after. SIGALRM ends one that
    takes too long."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    mutant = folder / "mutant"
    with (folder / "log").open("a") as log:
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")
            shutil.rmtree(mutant, ignore_errors=True)
            shutil.copytree(rng.choice(bases), mutant)
            what = mutate(mutant, rng)
            print(json.dumps([number, what, None]), file=log, flush=True)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            wrong = outcome(mutant, rng, trial)
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps([number, what, wrong]), file=log, flush=True)
