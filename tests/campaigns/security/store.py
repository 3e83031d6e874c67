"""Stores that are not what they seem: strangers in a directory, gateways in a bucket's place.

Each command must end soon, without a traceback: with an answer and a word about what it could not
read, or with one error and a hint. What a folder leads to that is a link decides no answer and is
left as it is. A gateway's answer is never an empty store, so there every
command ends with an error, after few requests.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infra.storage.base import MAX_RECORD
from tests.campaigns.security.records import ask, environment, fault_of, make_store, without_ages
from tests.integration.infra.storage.test_plain_files import STRANGERS
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import PAGE, Answer, Request
from tests.support.infra.storage.owners import path_of
from tests.support.infra.storage.s3_server import client_environment

COMMANDS = (
    *(("status",), ("ls",), ("plan", "tiny"), ("plan", "tiny", "sft"), ("gc",)),
    *(("sql", "select * from artifacts"), ("fetch", "sft@tiny"), ("tag",)),
)
SECONDS = 60  # in which a command ends, on a busy machine
MAX_REQUESTS = 60  # of a command that a gateway answers: 14 records at once, four tries each


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_RECORD + 1)


_STRANGERS: dict[str, Callable[[Path], None]] = {**STRANGERS, "huge": _sparse}
_NO_BUCKET = b"<ListBucketResult><Name>another</Name></ListBucketResult>"
_AWAY = {"Location": "http://portal.invalid/login"}
_GATEWAYS: dict[str, Answer] = {
    "page": Answer(body=PAGE, headers={"Content-Type": "text/html"}),
    "nothing": Answer(),
    "json": Answer(body=b"{}"),
    "another bucket": Answer(body=_NO_BUCKET),
    **{f"redirect {n}": Answer(status=n, body=PAGE, headers=_AWAY) for n in (301, 302, 307, 308)},
    **{f"page {n}": Answer(status=n, body=PAGE) for n in (401, 403, 404, 405)},
    **{f"text {n}": Answer(status=n, body=b"not found") for n in (400, 401, 403, 404)},
    "json 404": Answer(status=404, body=b'{"message": "no Route matched"}'),
    "nothing 404": Answer(status=404),
}


def try_strangers(directory: Path) -> tuple[int, list[str]]:
    """Put each stranger in the place of each kind of record, and make each folder a link.

    Return the number of attempts, and a line for each that got through.
    """
    attempts, through = 0, list[str]()
    store = make_store(directory / "store")
    keys = [entry.key for entry in store.list("") if entry.key.endswith(".json")]
    kinds = {
        key.rpartition("/")[2] if "/" in key[5:] else key.partition("/")[0]: key for key in keys
    }
    with environment(directory / "home", NANOCHAT_STORE=store.url):
        untouched = {command: _ask(command) for command in COMMANDS}
        for key in kinds.values():
            data = store.get(key)
            path = path_of(store, key)
            for kind, put in _STRANGERS.items():
                path.unlink()
                put(path)
                for command, old in untouched.items():
                    attempts += 1
                    # What is no file is not listed, so nothing need be said of it.
                    fault = fault_of(command, _ask(command), old, record=key, is_none=False)
                    if fault is not None:
                        through.append(f"{' '.join(command)}, {key}: {kind}: {fault}")
            path.unlink()
            store.put(key, data)
        for name in (*sorted({key.partition("/")[0] for key in keys}), ".tmp"):
            asked = [*COMMANDS, ("gc", "--apply")] if name == ".tmp" else COMMANDS
            attempts += len(asked)
            through += _linked(path_of(store, "x").with_name(name), directory / name, asked)
    return attempts, through


def _linked(folder: Path, outside: Path, commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Make a folder a link to its copy elsewhere, then to an empty one; yield what got through."""
    shutil.copytree(folder, outside)
    for name in ("documents/thesis", "0" * 32):
        (outside / name).parent.mkdir(exist_ok=True)
        (outside / name).write_text("not in the store")
    empty = outside.with_name("nothing")
    empty.mkdir(exist_ok=True)
    for path in (*outside.rglob("*"), outside):
        os.utime(path, (1e9, 1e9))  # older than what garbage collection leaves alone
    aside = outside.with_name("aside")
    folder.rename(aside)
    for command in commands:
        answers: list[tuple[int, str, str]] = []
        for target in (outside, empty):
            before = _contents(target)
            folder.symlink_to(target)
            answer = code, out, err = _ask(command)
            folder.unlink()
            answers.append((code, without_ages(out), err))
            fault = fault_of(command, answer, answer, record="", is_none=False)
            if _contents(target) != before:
                fault = "what lies outside the store has changed"
            if fault is not None:
                yield f"{' '.join(command)}, {folder.name}: link: {fault}"
        if answers[0] != answers[1]:
            yield f"{' '.join(command)}, {folder.name}: link: its answer is from outside the store"
    aside.rename(folder)


def _contents(directory: Path) -> list[tuple[str, float]]:
    paths = (directory, *directory.rglob("*"))
    return sorted((str(path), path.lstat().st_mtime) for path in paths)


def try_gateways(
    directory: Path, commands: Sequence[Sequence[str]] = COMMANDS
) -> tuple[int, list[str]]:
    """Let each gateway answer each command in place of a bucket; return as `try_strangers`."""
    attempts, through = 0, list[str]()
    fake = FakeS3()
    variables = client_environment(fake.endpoint) | {"NANOCHAT_STORE": "s3://fake/store"}
    with environment(directory / "empty", **variables):
        for name, answer in _GATEWAYS.items():
            fake.answer = lambda request, answer=answer: _for(request, answer)
            for command in commands:
                attempts += 1
                fake.requests.clear()
                code, _, err = found = _ask(command)
                fault = fault_of(command, found, found, record="", is_none=False)
                if code != 1:
                    fault = fault or f"exit code {code}, as if the store were empty"
                elif "error: store s3://fake/store" not in err:
                    fault = fault or f"another error: {err[:200]!a}"
                if len(fake.requests) > MAX_REQUESTS:
                    fault = fault or f"{len(fake.requests)} requests"
                if fault is not None:
                    through.append(f"{' '.join(command)}: {name}: {fault}")
    fake.stop()
    return attempts, through


def _for(request: Request, answer: Answer) -> Answer:
    body = b"" if request.method == "HEAD" else answer.body
    return Answer(status=answer.status, body=body, headers=dict(answer.headers))


def _ask(command: Sequence[str]) -> tuple[int, str, str]:
    """Ask a command, which may write where it runs; one that hangs ends with a traceback."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return ask(command)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
