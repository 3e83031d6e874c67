"""A store with one malformed record, seen by every command that reads.

Each record of a small store is ruined in seeded ways: bytes that are no record, and records whose
checksum is right and whose values are not. A command must end without a traceback: with what it
shows of an untouched store, with a warning about the record, or with one error and a hint.
"""

import contextlib
import io
import json
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flows.artifacts import checkpoint_records
from flows.artifacts.pins import PINS
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.cli.app import main
from flows.gc.collect import MARK
from flows.identity.fingerprint import REPOSITORY, Code, fingerprint_of
from flows.identity.records import encode_record
from flows.identity.redo import RedoCounter, raise_redo
from flows.leases import held_lease, lease
from flows.profiles import open_profile
from infra.storage.local import LocalStore
from tests.integration.infra.storage.test_plain_files import STRANGERS
from tests.support.flows.house import build
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("status", "tiny"),
    ("ls",),
    ("ls", "--json"),
    ("ls", "tiny"),
    ("ls", "sft@tiny"),
    ("plan", "tiny"),
    ("plan", "tiny", "--json"),
    ("plan", "tiny", "sft"),
    ("sql", "select * from runs"),
    ("sql", "select * from stages join artifacts using (stage, fingerprint)", "--json"),
    ("sql", "select * from evals"),
    ("tag",),
    ("compare", "sft@tiny", "sft@main"),
    ("compare", "tiny", "main"),
    ("gc",),
    ("gc", "--json"),
)
# They show everything that there is: one record that cannot be read may not end them.
_OVERVIEWS = {command for command in COMMANDS if command[0] in ("status", "ls", "sql", "tag")} - {
    ("status", "tiny"),
    ("ls", "tiny"),
    ("ls", "sft@tiny"),
}
_AGE = re.compile(r"heartbeat \d+ s ago")
_JSON = {command for command in COMMANDS if "--json" in command}
# Values of the wrong type, out of range, or that something after the reader could choke on.
_VALUES: tuple[Any, ...] = (
    *(None, True, 5, -1, 2**63, 10**400, 1.5, -0.0, 1e308, "", "x", "../../x", "a/b", "\ud800"),
    *("\x1b[2J\x1b]0;x\x07", "\u202etxt", "a\r\nwarning: b", "x" * 100_000, "9999-99-99T99:99:99Z"),
    *([], [[]], [None], {}, {"x": {}}, {"../x": "y"}, [5], ["x", 5], {"x": float("nan")}),
)
_BYTES: tuple[bytes, ...] = (
    *(b"", b"{", b"null", b"5", b"[]", b'"x"', b"\xff\xfe\x00", b"\x00" * 64, b"NaN", b"{}"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"format": 1e999}'),
    *(b"[" * 900 + b"]" * 900, b'{"format": 1, "format": 2}', "{\u2028}".encode("utf-16")),
)
_KEYS = (
    *("index/sft/x-", "index/sft/x-.y", "index/sft/5", "runs/x/y.json", "runs/.json", "runs/a"),
    *("refs/x/y.json", "refs/a", "gc/pins/x.json", "sft/x/manifest.json", "names/tiny/x"),
    *("names/x", "names/tiny/1-", "names/tiny/1-../x", "names/\u0663/1-odd", "names/odd/z-tiny"),
    *("{0}/checkpoints/step-abc/x/COMMIT.json", "{0}/checkpoints/step-0000001/COMMIT.json"),
    *("{0}/checkpoints/step-\u0663/x/COMMIT.json", "{0}/checkpoints/step-1e3/x/COMMIT.json"),
    *("{0}/checkpoints/step-" + "9" * 90 + "/x/COMMIT.json", "{0}/divergences/x.json"),
)


def make_store(directory: Path) -> LocalStore:
    """Fill a store with a record of every kind: `tiny` is built but for its last stage."""
    store = LocalStore(directory)
    run = open_profile("tiny").run
    made = build(store, directory.parent / "work", Code(REPOSITORY), run=run, until="chat_eval_sft")
    put_run(store, "tiny-20261121t055338z-0000", *made.values())
    put_run(store, "odd", *made.values(), name="odd", status="running", ended=None)
    point(store, "main", "odd")
    older = put_artifact(store, make_manifest("sft", metrics={"val_bpb": 1.5, "core_low": 0.1}))
    revoke(store, older, why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    revoke(store, made["midtrain"], why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    place = made["midtrain"].ref
    raise_redo(store, place, RedoCounter(), RedoCounter(number=0, runs=("r",)))
    held_lease.try_acquire(store, place, lease.Lease(owner="o", run="r", host="h", pid=1))
    _put_checkpoint(store, *place)
    artifacts = [[older.stage, older.fingerprint]]
    store.put(f"{PINS}1.json", encode_record({"artifacts": artifacts, "why": "x"}, format=1))
    store.put(MARK, encode_record({"marks": {"runs/odd.json": 1.0}}, format=1))
    return store


def _put_checkpoint(store: LocalStore, stage: str, fingerprint: str) -> None:
    place = f"{stage}/{fingerprint}/checkpoints/step-0000020/a"
    file = {"path": "t", "size": 1, "sha256": "0" * 64, "key": f"{place}/t", "content": None}
    commit = {"format": 1, "step": 20, "total": 90, "files": {"t": {"size": 1, "sha256": "0" * 64}}}
    tree = {"step": 20, "total": 90, "files": [file], "commit": commit, "owner": "o", "epoch": 1}
    record = encode_record(tree, format=checkpoint_records.FORMAT)
    store.put(f"{place}/t", b"x")
    store.put(f"{place}/COMMIT.json", record)


def ruin(data: bytes, choose: random.Random) -> tuple[str, bytes, bool]:
    """Return a word for what was done, other bytes, and whether they surely are no record."""
    match choose.randrange(5):
        case 0:
            number = choose.randrange(len(_BYTES))
            return f"bytes {number}", _BYTES[number], True
        case 1:
            place = choose.randrange(len(data))
            return f"cut at {place}", data[:place], True
        case 2:
            name = next(iter(json.loads(data)))
            return f"{name} twice", data.replace(b"{", f'{{"{name}": 0,'.encode(), 1), True
        case _:
            tree = json.loads(data)
            del tree["check"]
            what = change(tree, choose, lambda old: choose.choice(_VALUES))
            try:
                check = fingerprint_of(json.loads(json.dumps(tree)))
            except (ValueError, TypeError):  # no checksum of ours covers it
                check = "0" * 64
            return what, json.dumps({**tree, "check": check}).encode(), False


def change(tree: dict[str, Any], choose: random.Random, value: Callable[[Any], Any]) -> str:
    """Change one value somewhere in a JSON tree, to `value` of it; return what was done."""
    holder, name, path = choose.choice(list(_places(tree, ())))
    if choose.random() < 0.15:
        del holder[name]
        return f"{path} removed"
    if choose.random() < 0.15 and isinstance(holder, dict):
        holder["surplus"] = value(holder[name])
        return f"{path} has a neighbour"
    holder[name] = value(holder[name])
    return f"{path} = {ascii(holder[name])[:40]}"


def _places(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any, str]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in pairs:
        yield tree, name, ".".join(map(str, (*path, name)))
        if isinstance(value, dict | list):
            yield from _places(value, (*path, name))


def ask(command: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code of a command and what it printed; a traceback is code 99."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except Exception:  # noqa: BLE001 - what is looked for
            traceback.print_exc(limit=-2)
            code = 99
    return code, out.getvalue(), err.getvalue()


def without_ages(text: str) -> str:
    """Return what a command printed without what differs each second."""
    return _AGE.sub("", text)


def fault_of(
    command: Sequence[str], answer: tuple[int, str, str], untouched: tuple[int, str, str],
    *, record: str, is_none: bool,
) -> str | None:  # fmt: skip
    """Return what is wrong with an answer, None if it is right. No `record`: all may be unread."""
    code, out, err = answer
    if code == 99:
        return f"traceback: {err.strip().splitlines()[-1]}"
    if any(not (c.isprintable() or c in "\n") for c in out + err):
        return "control characters"
    if code == 1:
        lines = err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if len(errors) != 1 or not any(line.startswith("hint: ") for line in lines):
            return f"no error with a hint: {err[:200]!a}"
        is_ended = record and tuple(command) in _OVERVIEWS
        return f"ended by one record: {errors[0]!a}" if is_ended else None
    if tuple(command) in _JSON:
        try:
            json.loads(out)
        except ValueError:
            return "its output is no JSON"
    warnings = err.splitlines()
    if len(warnings) > 1 + untouched[2].count("\n"):
        return f"{len(warnings)} lines of warnings for one record"
    if command[0] == "gc":  # it counts bytes, and names what it reads in an error
        return None
    if is_none and without_ages(out) != without_ages(untouched[1]) and record not in err + out:
        return "another answer and no word about the record"
    return None


def run(directory: Path, seed: int, *, rounds: int) -> tuple[int, list[str]]:
    """Ruin every record of a store `rounds` times and look with each command.

    Also with keys that no version writes, and with what is no file in the place of each kind.

    Return the number of attempts, and a line for each that got through.
    """
    store = make_store(directory / "store")
    keys = [entry.key for entry in store.list("")]
    records = [key for key in keys if key.endswith(".json") and "/files/" not in key]
    place = next(key for key in records if key.startswith("midtrain/")).rpartition("/")[0]
    through: list[str] = []
    attempts = 0
    with environment(directory / "home", NANOCHAT_STORE=store.url):
        untouched = {command: ask(command) for command in COMMANDS}

        def look(what: str, record: str, *, is_none: bool) -> None:
            nonlocal attempts
            for command, old in untouched.items():
                attempts += 1
                fault = fault_of(command, ask(command), old, record=record, is_none=is_none)
                if fault is not None:
                    through.append(f"{' '.join(command)}, {record}: {what}: {fault}")

        for number, key in enumerate(records):
            data = store.get(key)
            for turn in range(rounds):
                what, other, is_none = ruin(data, random.Random(f"{seed} {number} {turn}"))
                store.put(key, other)
                look(what, key, is_none=is_none)
            store.put(key, data)
        for key in (key.format(place) for key in _KEYS):
            path = directory / "store" / key  # the store would refuse to write some of these
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
            look("is there", key, is_none=False)
            path.unlink()
        kinds = {key.rpartition("/")[2] if "/" in key[5:] else key[:5]: key for key in records}
        for key in kinds.values():
            data, path = store.get(key), directory / "store" / key
            for stranger, put in STRANGERS.items():
                path.unlink()
                put(path)
                # What is no file is not listed, so nothing need be said of it.
                look(stranger, key, is_none=False)
            path.unlink()
            store.put(key, data)
    return attempts, through


@contextlib.contextmanager
def environment(home: Path, **variables: str) -> Iterator[None]:
    """Let the commands of this process use this home, where they also write, and variables."""
    before = dict(os.environ)
    home.mkdir(exist_ok=True)
    os.environ |= {"NANOCHAT_HOME": str(home), "NO_COLOR": "1", **variables}
    try:
        with contextlib.chdir(home):
            yield
    finally:
        os.environ.clear()
        os.environ |= before
