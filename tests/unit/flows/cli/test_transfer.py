"""`nanochat fetch` and `nanochat push`, as a person meets them."""

import hashlib
from pathlib import Path

import pytest

from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.cli.app import main
from flows.cli.progress import QUIET_BYTES, describe_transfer, show_bytes
from infra.storage.base import Store
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal

FILES = {"config.json": b"{}", "tokenizer/a.json": b"[]"}


def test_fetch_copies_an_artifact_and_a_second_time_verifies_it(
    store: Store, tmp_path: Path, terminal: Terminal
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)
    target = tmp_path / "new" / "mine"
    words = ("fetch", "sft@tiny", "--to", str(target))

    assert terminal.said(*words) == [f"{target}: 2 files, 4 bytes, of {sft.name}"]
    assert (target / "tokenizer" / "a.json").read_text() == "[]"
    assert terminal.said(*words) == [
        f"{target}: already there, verified: 2 files, 4 bytes, of {sft.name}"
    ]
    (target / "config.json").unlink()
    assert terminal.said(*words) == [
        f"{target}: 2 files, 4 bytes, of {sft.name}, 1 of them there already"
    ]


def test_fetch_below_a_file_is_refused(store: Store, tmp_path: Path, terminal: Terminal):
    put_run(store, "tiny-1", publish_files(store, "sft", FILES, tmp_path))
    (tmp_path / "file").touch()
    error, hint = terminal.fails("fetch", "tiny", "--to", str(tmp_path / "file" / "below"))
    assert error == f"{tmp_path}/file/below cannot be written: not a directory"
    assert "--to" in hint


@pytest.mark.parametrize("target", ["/proc/x", "/proc/sys/x/below", "/sys/x"])
def test_a_directory_that_the_system_refuses_is_one_line(
    store: Store, tmp_path: Path, terminal: Terminal, target: str
):
    put_run(store, "tiny-1", publish_files(store, "sft", FILES, tmp_path))
    for words in (("fetch", "tiny", "--to", target), ("infra", "compose", target)):
        error, hint = terminal.fails(*words)

        assert target in error
        assert "another" in hint


def test_fetch_leaves_out_what_only_training_needs(
    store: Store, tmp_path: Path, terminal: Terminal
):
    trained = FILES | {"model.safetensors": b"weights", "optimizer.safetensors": b"moments"}
    sft = publish_files(store, "sft", trained, tmp_path)
    put_run(store, "tiny-1", sft)
    target = tmp_path / "mine"

    terminal.said("fetch", "tiny", "--to", str(target), "--model-only")
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert files == trained.keys() - {"optimizer.safetensors"}
    error, _ = terminal.fails("fetch", "tiny", "optimizer.safetensors", "--model-only")
    assert error == f"there is no 'optimizer.safetensors' in {sft.name}"


def test_fetch_without_a_directory_makes_one_here_and_pull_is_the_same_command(
    store: Store, tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)
    monkeypatch.chdir(tmp_path)
    name = f"sft-{sft.fingerprint[:12]}"
    assert terminal.said("pull", "tiny", "tokenizer") == [f"{name}: 1 file, 2 bytes, of {sft.name}"]
    assert (tmp_path / name / "tokenizer" / "a.json").exists()
    assert not (tmp_path / name / "config.json").exists()
    assert terminal.fails("fetch", "tiny", "weights") == (
        f"there is no 'weights' in {sft.name}",
        "in it: config.json, tokenizer/",
    )


def test_fetch_gives_nothing_when_the_store_is_damaged(
    store: Store, tmp_path: Path, terminal: Terminal
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)
    store.put(sft.files[0].key, b"[]")
    error, hint = terminal.fails("fetch", "sft@tiny", "--to", str(tmp_path / "mine"))
    assert "config.json" in error
    assert "sha256" in error
    assert sft.files[0].key in error
    assert "--force sft" in hint
    assert not (tmp_path / "mine").exists()


def test_a_revoked_artifact_is_fetched_only_by_its_fingerprint_and_with_a_warning(
    store: Store, tmp_path: Path, terminal: Terminal, capsys: pytest.CaptureFixture[str]
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)
    revoke(store, sft, why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    assert "wrong data" in terminal.fails("fetch", "sft@tiny", "--to", str(tmp_path / "a"))[0]
    assert main(["fetch", sft.name, "--to", str(tmp_path / "b")]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: ")
    assert "wrong data" in captured.err
    assert (tmp_path / "b" / "config.json").exists()


def test_an_interrupted_fetch_says_how_to_go_on(
    store: Store,
    tmp_path: Path,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "fetch", interrupt)
    assert main(["fetch", "tiny", "--to", str(tmp_path / "mine")]) == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes from here\n"
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "home"))
    terminal.said("fetch", "tiny", "--to", str(tmp_path / "mine"))


def test_push_sends_a_run_and_says_what_it_was(store: Store, tmp_path: Path, terminal: Terminal):
    sft = publish_files(store, "sft", FILES, tmp_path)
    tokenizer = publish_files(store, "tokenizer", {"t.json": b"12"}, tmp_path)
    put_run(store, "tiny-1", sft, tokenizer)
    to = (tmp_path / "other").as_uri()
    size = 4 + 2 + 2 * 3  # files, and two logs of three bytes
    assert terminal.said("push", "tiny", "--to", to) == [
        f"{to}: 2 artifacts, 5 files, {size} bytes"
    ]
    assert terminal.said("push", "tiny", "--to", to) == [
        f"{to}: 2 artifacts, 0 files, 0 bytes; 5 files there already"
    ]
    target = tmp_path / "mine"
    assert terminal.said("fetch", "sft@tiny", "--store", to, "--to", str(target))
    assert (target / "config.json").read_text() == "{}"
    assert not [path for path in (tmp_path / "home" / "push").iterdir() if path.is_dir()]


def test_push_warns_of_each_revoked_artifact_that_something_was_made_from(
    store: Store, tmp_path: Path, terminal: Terminal, capsys: pytest.CaptureFixture[str]
):
    rows = put_artifact(store, make_manifest("rows"))
    sft = make_manifest("sft", inputs={"rows": rows})
    for file in (*sft.files, *sft.logs):
        store.put(file.key, b"x" if file.path == "data" else b"{}")
    put_run(store, "tiny-1", put_artifact(store, sft))
    revoke(store, rows, why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    assert main(["push", "tiny", "--to", (tmp_path / "other").as_uri()]) == 0
    assert capsys.readouterr().err == (
        f"warning: made from {rows.name}, revoked 2026-11-21T06:00:00Z by me: wrong data\n"
    )


def test_push_says_in_which_store_a_tag_was_moved(store: Store, tmp_path: Path, terminal: Terminal):
    to = (tmp_path / "other").as_uri()
    put_run(store, "tiny-1")
    point(store, "main", "tiny-1")
    put_run(open_store(to), "other-1", name="other")
    point(open_store(to), "main", "other-1")
    first, _ = terminal.said("push", "main", "--to", to)
    assert first == f"tag main of {to} is moved: other-1 -> tiny-1"


def test_push_verify_mends_what_is_damaged_in_the_other_store_and_says_how_much(
    store: Store, tmp_path: Path, terminal: Terminal
):
    sft = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", sft)
    to = (tmp_path / "other").as_uri()
    words = ("push", "tiny", "--to", to, "--verify")
    assert terminal.said(*words) == [f"{to}: 1 artifact, 3 files, 7 bytes"]
    open_store(to).put(sft.files[0].key, b"[]")
    assert terminal.said(*words) == [
        f"{to}: 1 artifact, 1 file, 2 bytes; 2 files there already, verified; "
        "1 damaged file replaced"
    ]
    assert terminal.said(*words) == [
        f"{to}: 1 artifact, 0 files, 0 bytes; 3 files there already, verified"
    ]
    assert open_store(to).get(sft.files[0].key) == b"{}"


def test_what_another_push_left_on_its_way_does_not_end_this_one_in_an_error(
    store: Store, tmp_path: Path, terminal: Terminal
):
    put_run(store, "tiny-1", publish_files(store, "sft", FILES, tmp_path))
    to = (tmp_path / "other").as_uri()
    ways = hashlib.sha256(f"{store.url} {to}".encode()).hexdigest()[:12]
    left = tmp_path / "home" / "push" / ways / "left"
    left.parent.mkdir(parents=True)
    left.touch()
    assert terminal.said("push", "tiny", "--to", to)
    assert left.exists()


def test_push_says_which_artifact_was_there_first(store: Store, tmp_path: Path, terminal: Terminal):
    to = (tmp_path / "other").as_uri()
    ours = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", ours)
    publish_files(open_store(to), "sft", FILES, tmp_path, run="theirs")
    assert terminal.said("push", "sft@tiny", "--to", to) == [
        f"{ours.name} is in {to} already, made by run theirs, with the same contents: "
        "that one stays",
        f"{to}: 0 artifacts, 0 files, 0 bytes",
    ]


def test_push_refuses_what_makes_no_sense(store: Store, tmp_path: Path, terminal: Terminal):
    to = (tmp_path / "other").as_uri()
    example = "for example: nanochat push tiny --to "
    assert terminal.fails("push", "--to", to) == ("push what?", f"{example}{to}")
    assert terminal.fails("push") == ("push what?", f"{example}s3://bucket/prefix")
    assert terminal.fails("push", "tiny") == (
        "push where?",
        "give the URL of a store: --to s3://bucket/prefix",
    )
    assert "is the store they are in" in terminal.fails("push", "tiny", "--to", store.url)[0]
    assert terminal.fails("push", "tiny", "--to", to) == (
        f"tiny was never run in {store.url}",
        "nanochat run tiny",
    )
    assert "unsupported store URL" in terminal.fails("push", "tiny", "--to", "ftp://x")[0]
    assert not (tmp_path / "other").exists()


def test_a_long_transfer_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.cli.progress._SECONDS_BETWEEN_LINES", 0.0)
    with show_bytes(2 * QUIET_BYTES, what="sft/1a2b3c") as on_bytes:
        on_bytes(QUIET_BYTES)
        on_bytes(QUIET_BYTES)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        "sft/1a2b3c: 16.0 MB of 32.0 MB",
        "sft/1a2b3c: 32.0 MB of 32.0 MB",
    ]


def test_a_short_transfer_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.cli.progress._SECONDS_BETWEEN_LINES", 0.0)
    with show_bytes(QUIET_BYTES - 1, what="x") as on_bytes:
        on_bytes(1)
    assert capsys.readouterr().err == ""
    assert describe_transfer(QUIET_BYTES - 1, 1.0) == ""
    assert describe_transfer(32_000_000, 2.0) == ", in 2 s, 16.0 MB/s"


def test_on_a_terminal_a_long_transfer_is_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with show_bytes(QUIET_BYTES, what="sft/1a2b3c") as on_bytes:
        on_bytes(QUIET_BYTES)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sft/1a2b3c" in captured.err
    assert captured.err.endswith("\x1b[2K")
