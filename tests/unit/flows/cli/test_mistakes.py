"""Mistakes on the command line: one line, one hint, and nothing is written.

The exit code is 2 if the words alone are wrong.
"""

import os

import pytest

from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.cli.app import main
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

WORDS = """
pln tiny
xyzzy
verson
d12 plan --depth 2
sft
sft@tiny
seed=7
start
download tiny
export tiny x
logs tiny
plan
plan tiny --dept 3
plan tiny --zzz
plan tiny --depth
plan tiny --depth three
plan tiny --depth 0
plan tiny --gpus -1
plan tiny --threads 2
plan tiny --attention nope
plan tiny --pretrain.num_steps 5
run tiny small
run tiny seed=7
run tiny --resume
run tiny --seed=7
run tiny --num_steps 5
run tiny --nodes 0
run tiny --retries -1
chat tiny --batch-size 2
chat tiny --gpus -1
status tiny --tail 0
ls --limit 0
compare one two --answers -1
bench --depth 1 --tokens 1
bench --batch-sizes 4 0
accept tiny sft
accept tiny sft --why w --steps 0
gc --keep-days 0
gc --grace-hours -1
"""
NAMES = """
plan tinny
plan toknizer
plan no.toml
run no.toml
config no.toml
plan tiny sfx
plan tiny tny
plan tiny d12
plan tiny sft@tiny
plan tiny seed=7
plan seed=7
plan sft tiny
plan tiny --force stf
plan tiny --name d12
stage tiny
stage tiny pretrian
stage rl tiny
stage {}
stage tiny rows --name a/b
sweep sft --vary seed=1,2
chat sft
chat pretran
fetch sfx@tiny
fetch demo@rl
fetch sft@tiny model --as hf
ls tnyi
ls tiny
ls sft@tiny
ls sft/1a2b
ls sft@../../x
ls tiny@sft
ls --stage sfx
tag main
tag main tnyi
tag main sft@tiny
tag tiny d12
tag sft d12
tag a/b tiny
tag -- -x tiny
tag --delete
compare tiny seed=7
compare sft/1a2b tiny
status rl
status tiny stf
status --follow
status tiny sft --json
status tiny
accept tiny stf --why w
evals tiny --json
up --register --port 4300
up --register --pool a/b
up --pool a%
up --pool none --pool cpu
"""
VALUES = """
plan tiny --set pretrain.num_step=3
plan tiny --set pretrain.num_steps=many
plan tiny --set pretrain.num_steps
plan tiny --set numerics.precision=fp7
plan tiny --set model.width=65
plan tiny --set nonsense=5
plan tiny --set shards.column=body
plan tiny --set deep=3
plan tiny --depth 1000
plan tiny --store ftp://bucket
plan tiny --store file:///not/mounted/store
plan tiny --place attention=nope
plan tiny --place zzz=1
plan tiny --home /etc/hostname
plan tiny --home ~no-such-user
status --store file:///not/mounted/store
fetch sft@tiny --store file:///not/mounted/store
chat tiny --temperature 9
chat tiny --top-k -1
chat tiny --max-tokens 0
sweep tinny --vary seed=1,2
sweep tiny
sweep tiny --vary optimizer.muon_lr
sweep tiny --vary optimizer.muon_lr=0.1,
sweep tiny --vary optimizer.muon_lr=0.1,0.3 --vary optimizer.muon_lr=0.1,0.3
sweep tiny --vary optimizer.muon_l=1
sweep tiny --vary optimizer.muon_lr=fast
sweep tiny --vary optimizer.muon_lr=0.02
sweep tiny --vary seed=1,2
sweep tiny --vary optimizer.muon_lr=0.1,0.3 --seeds 1,x
sweep tiny --vary optimizer.muon_lr=0.1,0.3 --seeds 1,1
sweep tiny --vary optimizer.muon_lr=0.1,0.3 --stage sft
sweep tiny --vary optimizer.muon_lr=0.1,0.3 --name a/b
sweep tiny --vary model.depth=4
sweep tiny --vary model.depth=2,two
sweep tiny --vary model.depth=2,101
sweep tiny --vary model.depth=1,2 --depth 3
miniseries tiny --depths 2,two
miniseries tiny --depths 1,2 --set foo=1
miniseries tiny --depths 1,2 --reduction 3
"""
VALUES += f"chat {'a' * 300}\n"  # too long for a path
VALUES += f"sweep tiny --vary pretrain.num_steps={','.join(map(str, range(1, 41)))}\n"


def test_words_that_no_command_takes(tmp_path, terminal):
    for words in WORDS.strip().splitlines():
        terminal.refuses(words, code=2)
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("mistakes", [NAMES, VALUES], ids=["names", "values"])
def test_names_and_values_that_cannot_be(mistakes, terminal):
    for words in mistakes.strip().splitlines():
        terminal.refuses(words)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_more_gpus_than_this_machine_has_are_refused(command, terminal):
    error, hint = terminal.fails(command, "tiny", "--gpus", "999")
    assert error.startswith("--gpus is 999, this machine has ")
    assert hint


def test_a_home_that_may_not_be_written(tmp_path, terminal):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    terminal.refuses("plan", "tiny", "--home", f"{tmp_path}/locked/home")


def test_a_run_on_a_disk_without_room_does_not_start(tmp_path, monkeypatch, terminal):
    for name in ("DISK_NEEDED", "DISK_WANTED"):
        monkeypatch.setattr(f"flows.cli.checks.{name}", 1 << 60)
    error, hint = terminal.fails("run", "tiny")
    assert error.endswith(f"GiB free in {tmp_path / 'home'}")
    assert "free some space" in hint
    assert not (tmp_path / "home" / "prefect").exists()


def test_our_own_bugs_raise(store, monkeypatch):
    def broken(name, **changes):
        raise RuntimeError(name)

    monkeypatch.setattr("flows.plan.planned.open_profile", broken)
    with pytest.raises(RuntimeError, match="tiny"):
        main(["plan", "tiny"])


@pytest.mark.parametrize("words", ["plan", "run", "run --submit", "sweep", "miniseries"])
def test_a_run_given_for_a_profile_is_answered_with_its_profile_and_settings(
    words, store, terminal
):
    sft = put_artifact(store, make_manifest("sft"))
    put_run(store, "tiny2-1", sft, name="tiny2", depth=2, overrides=("seed=7",))
    point(store, "best", "tiny2-1")
    rest = {"sweep": " --vary seed=1,2", "miniseries": " --depths 1,2"}.get(words, "")
    for word in ("tiny2", "best", "sft@best", "tinyy", "bests"):
        terminal.refuses(f"{words} {word}{rest}")


def test_a_damaged_record_is_named(store, terminal):
    put_run(store, "tiny-1")
    store.put("runs/tiny-1.json", b"x")
    store.put("refs/main.json", b"x")
    sft = put_artifact(store, make_manifest("sft"))
    put_run(store, "d12-1", sft, name="d12")
    store.put(f"sft/{sft.fingerprint}/manifest.json", b"x")
    for words in ("ls tiny-1", "ls tiny", "ls main", "ls sft@main", "ls sft@d12", "ls broken"):
        terminal.refuses(words)
    terminal.refuses("tag best tiny-1")
    terminal.refuses("compare tiny-1 d12-1")
    terminal.refuses(f"compare sft@d12 {sft.name}")


def test_runs_and_artifacts_that_cannot_be_compared(store, terminal):
    put_run(store, "one", put_measured(store, "base_eval"), name="one")
    put_run(store, "two", put_measured(store, "pretrain"), name="two")
    for words in ("", "one", "one pretrain@two", "pretrain@two one", "one neither"):
        terminal.refuses(f"compare {words}")
    terminal.refuses("compare base_eval@one pretrain@two")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_is_not_a_model(command, tmp_path, store, terminal):
    put_run(store, "tiny-1", put_artifact(store, make_manifest("tokens")))
    (tmp_path / "file").touch()
    for model in (f"{tmp_path}/file", f"{tmp_path}/nothing"):
        terminal.refuses(command, model)
    if command == "serve":
        terminal.refuses(command, str(tmp_path), "--reload-on", "main")
    for model in ("tokens@tiny", "tiny", "d12", "tnyi", "sft@tiny", "sft@"):
        terminal.refuses(command, model)


def test_a_file_with_a_depth_is_no_profile_of_a_miniseries(terminal, tmp_path):
    deep = tmp_path / "deep.toml"
    deep.write_text('profile = "tiny"\ndepth = 4\n', encoding="utf-8")
    terminal.refuses(f"miniseries {deep} --depths 1,2")


@pytest.mark.parametrize("depth", [50, 900, 5_000, 100_000])
@pytest.mark.parametrize(
    "words",
    ["plan tiny --set seed=", "plan tiny --place threads=", "sweep tiny --vary seed=", "plan "],
)
def test_a_value_that_is_nested_too_deeply_is_one_line(words, depth, tmp_path, capsys):
    nested = "[" * depth + "]" * depth
    file = tmp_path / "mine.toml"
    file.write_text(f"profile = 'tiny'\nseed = {nested}\n")
    assert main(f"{words}{nested if '=' in words else file}".split()) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_an_evaluation_warns_once_of_what_the_model_was_made_from(store, terminal):
    rows, base = put_artifact(store, make_manifest("rows")), make_manifest("pretrain")
    model = put_artifact(
        store, make_manifest("sft", inputs={"pretrain": put_artifact(store, base)})
    )
    data = put_artifact(store, make_manifest("task_data"))
    put_run(store, "tiny-1", rows, data, base, model)
    revoke(store, base, why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    terminal.shows("evals tiny --place bogus=1", code=1)
