"""The chat server under load: `python bench/serve.py`, beside nanochat's of January 2026.

    NANOCHAT_JAN_DIR=/path/to/nanochat python bench/serve.py [--depth 4] [--clients 16]

Both serve the same random weights on this machine's CPU (or --device cuda: not run there yet), each
by its own command and with a thread for each core, in alternating rounds: one client asks
several times, then so many clients ask at once, while another connection asks /health without a
break. Connections are kept alive. No two prompts begin alike. At the end a client leaves in the
middle of an answer, and it is timed until the slot is free. Random weights never end an answer, so
every answer has all its tokens. The last line is JSON. Exit 1: a limit that was given (--at-least,
--most-health-ms and others) was exceeded.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import uvloop

from nanochat_core.eras import numerics
from nanochat_core.interop.nanochat_files import write_checkpoint
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling_january import january_model
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

ROOT = str(Path(__file__).resolve().parents[1])
ERA = "2026-01-05"
VOCAB = 65536
TAG = "random"
SECONDS_TO_START = 240
SHARED = 2.0  # of every embedding along one direction, over what is random in it
HOST = "127.0.0.1"
LEAVERS = {"ours": 15, "peer": 3}  # the peer writes on to the end, which takes a while
ALONE = 8  # questions of one client, one after the other
QUESTION = "What is the name of a river that flows through seven towns and into a lake"
Wire: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # a kept connection


@dataclass(frozen=True, kw_only=True)
class Side:
    """A running server."""

    port: int
    clients: int  # at once
    free: tuple[str, int]  # a field of /health, and its value while nothing is under way


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How one answer came."""

    first: float  # seconds to its first token
    tokens: int | None  # where the server tells


def main() -> None:
    """Measure, print a table and one line of JSON."""
    options = parse_options()
    os.environ.pop("OMP_NUM_THREADS", None)  # or the peer would take so many; we take all cores
    checkout = os.environ.get("NANOCHAT_JAN_DIR")
    if checkout is None:
        print("NANOCHAT_JAN_DIR is not set: there is no peer to compare with")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as running:
        model_dir, base = write_models(options.depth, Path(scratch))
        sides = {"ours": running.enter_context(ours(model_dir, options))}
        if checkout is not None:
            sides["peer"] = running.enter_context(peer(Path(checkout), base, options))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            for name, side in sides.items():
                rate = uvloop.run(measure(side, number, options))
                if number:  # the first round warms up
                    found[name].append(rate)
                print(f"{name} {number} {rate}", file=sys.stderr, flush=True)
        freed = {name: uvloop.run(leave(sides[name], LEAVERS[name], options)) for name in sides}
    report(options, found, freed)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--depth", type=int, default=4)
    add("--clients", type=int, default=16)
    add("--peer-clients", type=int, help="of the peer, if other than --clients")
    add("--tokens", type=int, default=64, help="of each answer")
    add("--rounds", type=int, default=3)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", default="fp32", help="of our weights; the peer's are fp32")
    add("--at-least", type=float, help="exit 1 when tokens/s are fewer times more")
    add("--at-least-first-token", type=float, help="exit 1 when it comes fewer times sooner")
    add("--most-first-token-ms", type=float, help="exit 1 when our one client's takes longer")
    add("--most-health-ms", type=float, help="exit 1 when our /health under load takes longer")
    add("--most-slot-free-ms", type=float, help="exit 1 when our slot is free later")
    return parser.parse_args()


def write_models(depth: int, scratch: Path) -> tuple[Path, Path]:
    """A model directory of ours, and nanochat's base directory with the same weights."""
    tokenizer = make_tokenizer()
    model = make_model(depth, tokenizer)
    ours, base = scratch / TAG, scratch / "base"
    checkpoint = base / "chatsft_checkpoints" / TAG
    for directory in (ours / "tokenizer", checkpoint):
        directory.mkdir(parents=True)
    tokenizer.save(ours / "tokenizer")
    save_model(ours, model, tokenizer=ours / "tokenizer", optimizer={}, made_by="sft")
    write_checkpoint(checkpoint, model, tokenizer, step=1, extra={})
    shutil.copytree(checkpoint / "tokenizer", base / "tokenizer")
    return ours, base


def make_tokenizer() -> Tokenizer:
    """The bytes, pairs of them as far as ids go, and the special tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    pairs = VOCAB - 256 - len(SPECIAL_TOKENS)
    return Tokenizer(ranks | {bytes(divmod(i, 256)): 256 + i for i in range(pairs)})


def make_model(depth: int, tokenizer: Tokenizer) -> GPT:
    """Random weights that write ASCII and never end an answer.

    The peer holds text back that is not whole characters, and its first token is to be timed.
    """
    config = january_model(depth, vocab_size=VOCAB)
    model = GPT(config, numerics("fp32", era=ERA))
    model.init_weights(1)
    unlikely = [not tokenizer.decode_bytes([i]).isascii() for i in range(tokenizer.bos)]
    unlikely += [True] * (model.lm_head.weight.shape[0] - tokenizer.bos)
    direction = torch.full((config.width,), config.width**-0.5)
    with torch.no_grad():
        # No block adds anything yet, so each hidden state keeps this part of its embedding.
        table = model.transformer.wte.weight
        table.add_(SHARED * config.width**0.5 * direction)
        model.lm_head.weight[torch.tensor(unlikely)] = -direction
    return model.eval()


@contextlib.contextmanager
def ours(directory: Path, options: argparse.Namespace) -> Iterator[Side]:
    """`nanochat serve`, as it comes."""
    port = free_port()
    command = ["nanochat_flows", "serve", str(directory), "--port", str(port)]
    command += [] if options.device == "cuda" else ["--gpus", "0"]
    command += ["--precision", options.precision, "--log", "none", "--max-seconds", "3600"]
    with server(command, port, Path.cwd(), {}):
        yield Side(port=port, clients=options.clients, free=("running", 0))


@contextlib.contextmanager
def peer(checkout: Path, base: Path, options: argparse.Namespace) -> Iterator[Side]:
    """Its scripts/chat_web.py, as it comes."""
    port = free_port()
    command = ["scripts.chat_web", "-i", "sft", "-g", TAG, "-p", str(port), "--host", HOST]
    environment = {"NANOCHAT_BASE_DIR": str(base)}
    with server([*command, "--device-type", options.device], port, checkout, environment):
        clients = options.peer_clients or options.clients
        yield Side(port=port, clients=clients, free=("available_workers", 1))


@contextlib.contextmanager
def server(command: list[str], port: int, cwd: Path, environment: dict[str, str]) -> Iterator[None]:
    """`python -m command` until it is ready, and as long as the block lasts."""
    # Not our repository, whose `tasks` would come before the peer's: that has no __init__.
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in ("", ROOT)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), *paths]), **environment},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            until = time.monotonic() + SECONDS_TO_START
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} does not serve: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    """Whether the server there has loaded its model."""

    async def ask() -> bool:
        wire = await asyncio.open_connection(HOST, port)
        with contextlib.closing(wire[1]):
            return (await get_health(wire))["ready"]

    try:
        return uvloop.run(ask())
    except (OSError, ValueError, AssertionError):
        return False


async def measure(side: Side, number: int, options: argparse.Namespace) -> dict[str, float]:
    """One round: one client alone, then all at once."""
    wire = await connect(side)
    prompts = iter(range(1000 * number, 1000 * (number + 1)))
    alone = [await ask(wire, make_prompt(next(prompts)), 2) for _ in range(ALONE)]
    wire[1].close()
    return {
        "one_first_token_ms": 1e3 * statistics.median(answer.first for answer in alone),
        **await load(side, [make_prompt(next(prompts)) for _ in range(side.clients)], options),
    }


async def load(side: Side, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """All clients at once, each with its prompt, and one that asks /health meanwhile."""
    wires = [await connect(side) for _ in prompts]
    healths: list[float] = []
    asking = asyncio.create_task(ask_health(side, healths))
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(ask(wire, prompt, options.tokens) for wire, prompt in zip(wires, prompts, strict=True))
    )
    seconds = time.perf_counter() - began
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    for _, writer in wires:
        writer.close()
    assert all(answer.tokens in (None, options.tokens) for answer in answers), "an answer ended"
    firsts = sorted(answer.first for answer in answers)
    return {
        "tokens_per_second": len(prompts) * options.tokens / seconds,
        "first_token_ms": 1e3 * statistics.median(firsts),
        "first_token_p99_ms": 1e3 * firsts[int(0.99 * len(firsts))],
        "health_ms": 1e3 * statistics.median(healths) if healths else 1e3 * seconds,
    }


async def leave(side: Side, times: int, options: argparse.Namespace) -> float:
    """Milliseconds, the median, from a client's leaving until nothing is under way."""
    seconds, watch = list[float](), await connect(side)
    for number in range(times):
        reader, writer = await connect(side)
        send(writer, make_prompt(-1 - number), 4 * options.tokens)
        await first_token(reader)
        await asyncio.sleep(random.Random(number).uniform(0.0, 0.02))
        began = time.perf_counter()
        writer.transport.abort()
        while (await get_health(watch))[side.free[0]] != side.free[1]:
            await asyncio.sleep(0.002)
        seconds.append(time.perf_counter() - began)
    watch[1].close()
    return 1e3 * statistics.median(seconds)


async def connect(side: Side) -> Wire:
    """A connection that has had an answer: what a new one does differently is not measured."""
    wire = await asyncio.open_connection(HOST, side.port)
    await get_health(wire)
    return wire


async def ask(wire: Wire, prompt: str, tokens: int) -> Answer:
    """One answer from its request to its end."""
    reader, writer = wire
    began = time.perf_counter()
    send(writer, prompt, tokens)
    await first_token(reader)
    first = time.perf_counter() - began
    reported = None
    while (line := await reader.readline()) != b"0\r\n":  # the chunk that ends the answer
        assert line, "the stream broke off"
        if line.startswith(b'data: {"usage"'):
            reported = json.loads(line[6:])["usage"]["completion_tokens"]
    assert await reader.readline() == b"\r\n"
    return Answer(first=first, tokens=reported)


def send(writer: asyncio.StreamWriter, prompt: str, tokens: int) -> None:
    """Ask for an answer."""
    messages = [{"role": "user", "content": prompt}]
    asked = {"messages": messages, "max_tokens": tokens, "temperature": 0.8, "top_k": 50}
    body = json.dumps(asked)
    head = f"POST /chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())


async def first_token(reader: asyncio.StreamReader) -> None:
    """Read up to the first event with text."""
    while b'"token"' not in (line := await reader.readline()):
        assert line, "the stream broke off"


async def ask_health(side: Side, seconds: list[float]) -> None:
    """Time /health again and again; `seconds` gets them."""
    wire = await connect(side)
    while began := time.perf_counter():
        await get_health(wire)
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)


async def get_health(wire: Wire) -> dict[str, Any]:
    """GET /health."""
    reader, writer = wire
    writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    length = 0
    while (line := await reader.readline()) != b"\r\n":
        assert line, "the connection broke off"
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return json.loads(await reader.readexactly(length))


def make_prompt(number: int) -> str:
    """The same words in another order for each number."""
    words = random.Random(number).choices(QUESTION.split(), k=24)
    return f"{number}: {' '.join(words)}?"


def free_port() -> int:
    """A port that no process listens on."""
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def report(
    options: argparse.Namespace,
    found: dict[str, list[dict[str, float]]],
    freed: dict[str, float],
) -> None:
    """A table and one line of JSON."""
    rows = {
        name: {
            **{key: round(statistics.median(r[key] for r in rates), 2) for key in rates[0]},
            "slot_free_ms": round(freed[name], 2),
        }
        for name, rates in found.items()
    }
    for key in rows["ours"]:
        print(f"{key:20}", *(f"{name} {row[key]:>10,.1f}" for name, row in rows.items()))
    result: dict[str, Any] = {"settings": vars(options), "torch": torch.__version__, **rows}
    if "peer" in rows:
        a, b = rows["ours"], rows["peer"]
        of = "tokens_per_second"
        result[f"ratio_{of}"] = round(a[of] / b[of], 2)
        for name in ("first_token", "one_first_token"):
            result[f"ratio_{name}"] = round(b[f"{name}_ms"] / a[f"{name}_ms"], 1)
    print(json.dumps(result))
    if broken := broken_limits(options, result):
        sys.exit("\n".join(broken))  # status 1


def broken_limits(options: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """What is not as it was to be, a line for each; without a peer no ratio counts."""
    ours, ratio = result["ours"], result.get
    least = [
        ("tokens/s", ratio("ratio_tokens_per_second"), options.at_least),
        ("first token", ratio("ratio_first_token"), options.at_least_first_token),
    ]
    most = [
        ("one client's first token", ours["one_first_token_ms"], options.most_first_token_ms),
        ("/health", ours["health_ms"], options.most_health_ms),
        ("slot free", ours["slot_free_ms"], options.most_slot_free_ms),
    ]
    broken = [
        f"{name}: {ratio} times, at least {limit:g} wanted"
        for name, ratio, limit in least
        if None not in (ratio, limit) and ratio < limit
    ]
    return broken + [
        f"{name}: {found} ms, at most {limit:g} wanted"
        for name, found, limit in most
        if limit is not None and found > limit
    ]


if __name__ == "__main__":
    main()
