"""`nanochat fetch` and `nanochat push`."""

import pytest

from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.cli.output import QUIET_BYTES, describe_transfer, show_bytes
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import make_manifest, put_artifact, put_run, put_whole

FILES = {"config.json": b"{}", "tokenizer/a.json": b"[]"}
REVOKED = {"why": "wrong data", "who": "me", "when": "2026-11-21T06:00:00Z"}


@pytest.fixture
def sft(store, tmp_path):
    """A model of a run of tiny."""
    made = publish_files(store, "sft", FILES, tmp_path)
    put_run(store, "tiny-1", made)
    return made


@pytest.fixture
def to(tmp_path):
    """The URL of another store."""
    return (tmp_path / "other").as_uri()


def files_in(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.usefixtures("sft")
def test_fetch_copies_an_artifact_and_a_second_time_verifies_it(tmp_path, terminal):
    words = ("fetch", "sft@tiny", "--to", str(target := tmp_path / "new" / "mine"))
    terminal.shows(*words)
    assert files_in(target) == FILES
    terminal.shows(*words)
    (target / "config.json").unlink()
    terminal.shows(*words)
    assert files_in(target) == FILES


@pytest.mark.usefixtures("sft")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, terminal):
    (tmp_path / "file").touch()
    terminal.refuses("fetch", "tiny", "--to", str(tmp_path / "file" / "below"))
    for target in ("/proc/x", "/proc/sys/x/below", "/sys/x"):
        for words in (("fetch", "tiny", "--to", target), ("infra", "compose", target)):
            error, hint = terminal.fails(*words)
            assert target in error
            assert "another" in hint


def test_fetch_leaves_out_what_only_training_needs(store, tmp_path, terminal):
    trained = FILES | {"model.safetensors": b"weights", "optimizer.safetensors": b"moments"}
    put_run(store, "tiny-1", publish_files(store, "sft", trained, tmp_path))
    target = tmp_path / "mine"
    terminal.said("fetch", "tiny", "--to", str(target), "--model-only")
    assert files_in(target).keys() == trained.keys() - {"optimizer.safetensors"}
    terminal.refuses("fetch tiny optimizer.safetensors --model-only")


def test_fetch_without_a_directory_makes_one_here_and_pull_is_the_same_command(
    sft, tmp_path, terminal, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    terminal.shows("pull tiny tokenizer")
    assert files_in(tmp_path / f"sft-{sft.fingerprint[:12]}").keys() == {"tokenizer/a.json"}
    terminal.refuses("fetch tiny weights")


def test_fetch_gives_nothing_when_the_store_is_damaged(sft, store, tmp_path, terminal):
    store.put(sft.files[0].key, b"[]")
    error, hint = terminal.fails("fetch", "sft@tiny", "--to", str(tmp_path / "mine"))
    for part in ("config.json", "sha256", sft.files[0].key):
        assert part in error
    assert "--force sft" in hint
    assert not (tmp_path / "mine").exists()


def test_a_revoked_artifact_is_fetched_only_by_its_fingerprint_and_with_a_warning(
    sft, store, tmp_path, terminal
):
    revoke(store, sft, **REVOKED)
    terminal.refuses("fetch", "sft@tiny", "--to", str(tmp_path / "a"))
    terminal.shows("fetch", sft.name, "--to", str(tmp_path / "b"))
    assert (tmp_path / "b" / "config.json").exists()


@pytest.mark.usefixtures("sft")
def test_an_interrupted_fetch_prints_how_to_resume(tmp_path, terminal, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    words = ("fetch", "tiny", "--to", str(tmp_path / "mine"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "fetch", interrupt)
        terminal.shows(*words, code=130)
    terminal.shows(*words)


def test_push_sends_a_run_and_prints_what_it_was(sft, store, tmp_path, terminal, to):
    tokenizer = publish_files(store, "tokenizer", {"t.json": b"12"}, tmp_path)
    put_run(store, "tiny-1", sft, tokenizer)
    terminal.shows("push", "tiny", "--to", to)
    terminal.shows("push", "tiny", "--to", to)
    target = tmp_path / "mine"
    terminal.said("fetch", "sft@tiny", "--store", to, "--to", str(target))
    assert files_in(target) == FILES
    assert list((tmp_path / "home").glob("scratch-*")) == []


def test_push_warns_of_each_revoked_artifact_that_something_was_made_from(store, terminal, to):
    rows = put_artifact(store, make_manifest("rows"))
    put_run(store, "tiny-1", put_whole(store, make_manifest("sft", inputs={"rows": rows})))
    revoke(store, rows, **REVOKED)
    terminal.shows("push", "tiny", "--to", to)


def test_push_prints_in_which_store_a_tag_was_moved(store, terminal, to):
    put_run(store, "tiny-1")
    point(store, "main", "tiny-1")
    put_run(open_store(to), "other-1", name="other")
    point(open_store(to), "main", "other-1")
    for name in ("tiny", "main"):
        terminal.shows("push", name, "--to", to)


@pytest.mark.usefixtures("sft")
def test_push_prints_which_artifact_was_there_first(tmp_path, terminal, to):
    theirs = publish_files(open_store(to), "sft", FILES, tmp_path, run="theirs")
    terminal.shows("push", "sft@tiny", "--to", to)
    assert find_manifest(open_store(to), theirs.ref) == theirs


def test_push_refuses_what_makes_no_sense(store, tmp_path, terminal, to):
    for words in ("", "tiny", f"--to {to}", f"tiny --to {to}", f"tiny --to {store.url}"):
        terminal.refuses(f"push {words}")
    terminal.refuses("push tiny --to ftp://x")
    for name in ("tnyi", "sft@tnyi", "sft/1a2b3c", "sfx@tiny", "../x"):
        terminal.refuses(f"push {name} --to {to}")
    assert not (tmp_path / "other").exists()


def test_a_long_transfer_prints_now_and_then_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr("flows.cli.output.SLOW_SECONDS", 0.0)
    with show_bytes(2 * QUIET_BYTES, what="sft/1a2b3c") as on_bytes:
        on_bytes(QUIET_BYTES)
        on_bytes(QUIET_BYTES)
    with show_bytes(QUIET_BYTES - 1, what="a short one") as on_bytes:
        on_bytes(1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.partition(", ")[0] for line in printed.err.splitlines()] == [
        "sft/1a2b3c: 16.0 MB of 32.0 MB",
        "sft/1a2b3c: 32.0 MB of 32.0 MB",
    ]
    assert describe_transfer(QUIET_BYTES - 1, 1.0) == ""
    assert describe_transfer(32_000_000, 2.0) == ", in 2 s, 16.0 MB/s"


def test_on_a_terminal_a_long_transfer_is_a_line_that_goes_away(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with show_bytes(QUIET_BYTES, what="sft/1a2b3c\a") as on_bytes:
        on_bytes(QUIET_BYTES)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert r"sft/1a2b3c\x07" in printed.err
    assert printed.err.endswith("\x1b[2K")
