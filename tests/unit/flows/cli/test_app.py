"""What the command line answers, above all to mistakes: one line, one hint."""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from cyclopts import App

from flows.cli.app import main, make_app
from flows.cli.train.run import resumable
from flows.orchestration.local_run import stoppable
from flows.profiles import PROFILES
from infra.storage.base import Store
from tests.support.flows.terminal import Terminal

COMMANDS = [  # in the order of the help
    *("plan", "run", "stage", "sweep", "miniseries", "status"),
    *("accept", "config"),
    *("chat", "serve", "fetch", "pull", "push", "import", "report"),
    *("ls", "tag", "compare", "sql", "revoke", "gc", "data", "evals"),
    *("doctor", "up", "down", "infra", "bench", "completion"),
]


# --- mistakes


@pytest.mark.parametrize("words", ["plan tinny", "run tinny", "plan tinny sft"])
def test_a_wrong_profile_is_answered_with_the_nearest(words: str, terminal: Terminal) -> None:
    assert terminal.fails(*words.split()) == ("there is no profile 'tinny'", "did you mean 'tiny'?")


@pytest.mark.parametrize(
    ("override", "error", "hint"),
    [
        ("pretrain.num_step=3", "there is no setting 'pretrain.num_step'", "pretrain.num_steps"),
        ("pretrian.num_steps=3", "there is no setting 'pretrian.num_steps'", "pretrain.num_steps"),
        ("pretrain.num_steps=many", "'many', expected int", "a whole number, like 8"),
        ("pretrain.num_steps", "is not of the form section.name=value", "--set pretrain.num_steps"),
        ("numerics.precision=fp7", "numerics.precision is 'fp7'", "one of: fp32, bf16"),
        ("nonsense=5", "there is no setting 'nonsense'", "the nearest are "),
        ("deep=3", "there is no setting 'deep'", "did you mean 'model.depth'?"),
        (
            "d=1",
            "there is no setting 'd'",
            "the nearest are seed, model.depth, model.width, model.num_heads, model.num_kv_heads; "
            "docs/reference/config.md has all",
        ),
        ("model.width=65", "model.width 65 is not a multiple", "--set "),
    ],
)
def test_a_wrong_setting_is_answered_with_the_right_form(
    override: str, error: str, hint: str, terminal: Terminal
) -> None:
    said = terminal.fails("plan", "tiny", "--set", override)
    assert error in said[0]
    assert hint in said[1]


@pytest.mark.parametrize(
    ("depth", "code", "way_out"),
    [("0", 2, "at least 1"), ("-3", 2, "at least 1"), ("1000", 1, "number of layers")],
)
def test_a_depth_that_cannot_be(depth: str, code: int, way_out: str, terminal: Terminal) -> None:
    error, hint = terminal.fails("plan", "tiny", "--depth", depth, code=code)
    assert depth in error
    assert way_out in hint


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("plan tiny --store ftp://bucket", "unsupported store URL 'ftp://bucket'"),
        ("plan tiny --store file:///not/mounted/store", "cannot be reached"),
        ("plan tiny --place attention=nope", "attention is 'nope'"),
        ("status --store file:///not/mounted/store", "cannot be reached"),
        ("fetch sft@tiny --store file:///not/mounted/store", "cannot be reached"),
        ("plan tiny --home /etc/hostname", "/etc/hostname cannot be written: file exists"),
        (
            "plan tiny --home /etc/hostname/below",
            "/etc/hostname/below cannot be written: not a directory",
        ),
        ("run tiny --gpus 999", "--gpus is 999, this machine has"),
        ("chat tiny --gpus 999", "--gpus is 999, this machine has"),
    ],
)
def test_a_wrong_place(words: str, error: str, terminal: Terminal) -> None:
    said = terminal.fails(*words.split())
    assert error in said[0]
    assert said[1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("plan tiny --attention nope", 'invalid value "nope" for --attention'),
        ("plan tiny --gpus -1", "--gpus is -1"),
        ("run tiny --nodes 0", "--nodes is 0"),
        ("run tiny --retries -1", "--retries is -1"),
        ("chat tiny --gpus -1", "--gpus is -1"),
    ],
)
def test_a_wrong_value_of_an_option(words: str, error: str, terminal: Terminal) -> None:
    said = terminal.fails(*words.split(), code=2)
    assert error in said[0]
    assert said[1]


@pytest.mark.parametrize(
    "words",
    ["run tiny --force sfx", "run tiny --from-stage sfx", "fetch sfx@tiny"],
)
def test_a_wrong_stage(words: str, terminal: Terminal) -> None:
    error, hint = terminal.fails(*words.split())
    assert error == "there is no stage 'sfx'"
    assert "sft" in hint


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--temperature", "9", "temperature is 9.0"),
        ("--top-k", "-1", "top-k is -1"),
        ("--max-tokens", "0", "max-tokens is 0"),
    ],
)
def test_sampling_that_cannot_be(option: str, value: str, error: str, terminal: Terminal) -> None:
    assert terminal.fails("chat", "tiny", option, value)[0] == error


@pytest.mark.parametrize(
    ("words", "error", "way_out"),
    [
        ("chat ~no-such-user/model", "the ~ of a path names a user without", "write the path out"),
        ("plan tiny --home ~no-such-user", "the ~ of a path names a user without", "write"),
        (f"chat {'a' * 300}", "file name too long: aaa", "a shorter name"),
    ],
)
def test_a_path_that_cannot_be(words: str, error: str, way_out: str, terminal: Terminal) -> None:
    found, hint = terminal.fails(*words.split())
    assert found.startswith(error)
    assert way_out in hint


def test_a_home_that_may_not_be_written(tmp_path: Path, terminal: Terminal) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    error, hint = terminal.fails("plan", "tiny", "--home", f"{tmp_path}/locked/home")
    assert error.startswith("permission denied")
    assert "--home" in hint


def test_a_run_on_a_disk_without_room_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    for name in ("DISK_NEEDED", "DISK_WANTED"):
        monkeypatch.setattr(f"flows.cli.checks.{name}", 1 << 60)
    error, hint = terminal.fails("run", "tiny")
    assert error.endswith(f"GiB free in {tmp_path / 'home'}")
    assert "free some space" in hint
    assert not (tmp_path / "home" / "prefect").exists()


def test_our_own_bugs_raise(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, **changes: object) -> object:
        raise RuntimeError(name)

    monkeypatch.setattr("flows.plan.planned.open_profile", broken)
    with pytest.raises(RuntimeError, match="tiny"):
        main(["plan", "tiny"])


# --- help


def commands_of(app: App) -> dict[str, App]:
    return {name: app[name] for name in app if not name.startswith("-")}


def listed(said: str) -> list[str]:
    """Return the commands that a help describes, in its order."""
    return re.findall(r"^\u2502 ([a-z]+) ", said, re.MULTILINE)


@pytest.mark.parametrize("words", ["help", "--help", "-h", ""])
def test_the_help_lists_every_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "fetch (pull)" in said
    assert listed(said) == [name for name in COMMANDS if name not in ("pull", "miniseries")]
    assert list(commands_of(make_app())) == COMMANDS


def test_a_terminal_without_some_letters_shows_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    assert main(["--help"]) == 0
    assert b"nanochat" in written.getvalue()


def test_the_help_has_the_first_paragraph_of_every_command_s_own_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no paragraph is broken
    assert main(["--help", "--all"]) == 0
    rows = [line.strip("\u2502 ").partition("  ") for line in capsys.readouterr().out.splitlines()]
    shown = {name: about.strip() for names, _, about in rows for name in re.findall(r"\w+", names)}
    for name, app in commands_of(make_app()).items():
        assert shown[name] == (app.help or "").partition("\n")[0]


@pytest.mark.parametrize("words", ["--help plan", "plan --help", "help plan"])
def test_the_help_of_a_command_may_be_asked_for_before_or_after_its_name(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 0
    assert "Usage: nanochat plan [OPTIONS] PROFILE" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_parameter_is_described(command: str) -> None:
    whole = make_app()[command]
    for app in commands_of(whole).values() or [whole]:
        assert app.help
        undescribed = [
            argument.name
            for argument in app.assemble_argument_collection()
            if argument.parse and argument.show and not argument.parameter.help
        ]
        assert undescribed == []


@pytest.mark.parametrize("word", ["help", "-h"])
def test_the_list_of_commands_has_several_names(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    whole = capsys.readouterr().out
    assert main([word]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_the_package_s(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == "0.1.0\n"


def test_profiles_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:] if line[0] != " "] == list(PROFILES)
    assert main(["config", "--json"]) == 0
    d12 = next(row for row in json.loads(capsys.readouterr().out) if row["profile"] == "d12")
    assert (d12["depth"], d12["parameters"]) == (12, 286_261_730)
    assert d12["about"]


def test_a_command_that_exits_at_once_prints_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)

    def stop_twice() -> None:
        with resumable("nanochat run tiny", stages=["sft"]) as display, stoppable(display):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as left:
        stop_twice()

    assert left.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\nhint: resume with: nanochat run tiny\n"


def test_an_import_that_is_interrupted_is_finished_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Left in the middle it can hold the lock of all imports, for which other threads then wait.
    (tmp_path / "interrupted.py").write_text(
        "import signal, time\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "time.sleep(0.2)\n"  # the signal comes again meanwhile
        "done = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def stop() -> None:
        with resumable("nanochat run tiny", stages=["sft"]) as display, stoppable(display):
            importlib.import_module("interrupted")
            while True:  # until the signal comes once more
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert sys.modules.pop("interrupted").done
