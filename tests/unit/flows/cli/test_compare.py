"""`nanochat compare`: what differs, numbers with intervals, answers that changed."""

import pytest

from flows.cli.output import age
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import CREATED, make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal

ONE_TWO = ("one", "two")


def judged(store: Store, seed: int, right: list[bool]) -> Manifest:
    share = sum(right) / len(right)
    return put_measured(
        store,
        "base_eval",
        config={"seed": seed},
        metrics={
            "sums": share,
            "sums_low": share - 0.1,
            "sums_high": share + 0.1,
            "val_bpb": 1.0 + seed / 8,
        },
        examples=[
            {
                "task": "sums",
                "place": i,
                "answer": f"{seed if is_right else 'no'}",
                "correct": is_right,
            }
            for i, is_right in enumerate(right)
        ],
    )


@pytest.fixture
def runs(store: Store) -> list[Manifest]:
    """The second answers 30 of 100 questions right that the first does not, and loses 5."""
    model = put_measured(store, "pretrain", metrics={"val_bpb": 1.5})
    first = judged(store, 0, [i < 40 for i in range(100)])
    second = judged(store, 1, [5 <= i < 70 for i in range(100)])
    put_run(store, "one", model, first, name="one")
    put_run(store, "two", model, second, name="two")
    return [first, second]


def test_scores_stand_side_by_side_with_what_changed(runs: list[Manifest], terminal: Terminal):
    lines = terminal.said("compare", "one", "two")
    assert lines == [
        "two against one: 1 better (pretraining sums), 1 without a significant difference",
        "two differs from one in seed 0 -> 1",
        "",
        "stage        score          one     two     difference",
        "pretraining  sums           40.0 %  65.0 %  +25.0 points (+14.0 to +35.0) better",
        "pretraining  bits per byte  1       1.125   +0.125",
        "",
        "pretraining sums: two gained 30 and lost 5 of 100 questions; 70 answers changed",
        "",
        "the same artifact: pretraining",
        "",
        f"one  finished  {age(CREATED)}  nanochat run tiny --name one",
        f"two  finished  {age(CREATED)}  nanochat run tiny --name two",
        "",
        f"two  ~  base_eval  {runs[0].fingerprint[:12]} -> {runs[1].fingerprint[:12]}  seed 0 -> 1",
    ]


def test_less_is_better_of_losses_and_counts_are_written_alike(store: Store, terminal: Terminal):
    for seed, (bpb, tokens) in enumerate(((1.0, 40_960), (1.2, 245_760), (0.9, 1_186_917_580_800))):
        bounds = {"val_bpb": bpb, "val_bpb_low": bpb - 0.01, "val_bpb_high": bpb + 0.01}
        config = {"seed": seed}
        made = [
            put_measured(store, "base_eval", config=config, metrics=bounds),
            put_measured(store, "pretrain", config=config, metrics={"tokens": tokens}),
            put_measured(store, "report", config=config, metrics={"bytes": seed}),
        ]
        put_run(store, f"r{seed}", *made, name=f"r{seed}")
    lines = terminal.said("compare", "r0", "r1", "r2", "r0")
    assert [" ".join(line.split()) for line in lines if line.startswith("pretraining")] == [
        "pretraining bits per byte 1.0000 1.2000 +0.2000 (+0.1859 to +0.2141) worse "
        "0.9000 -0.1000 (-0.1141 to -0.0859) better 1.0000 same",
        "pretraining tokens 40,960 245,760 +204,800 1.19 T +1.19 T 40,960 same",
    ]
    table = lines[: lines.index(next(line for line in lines if line.startswith("r0  ")))]
    assert not any("report" in line or "bytes" in line.split() for line in table)
    assert [stage["stage"] for stage in terminal.read("compare", "r0", "r1")["stages"]] == [
        *("pretrain", "base_eval", "report")
    ]


def test_a_difference_has_the_colour_of_its_verdict(
    runs: list[Manifest], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    there, back = (
        "\n".join(terminal.said("compare", *names)) for names in (ONE_TWO, ONE_TWO[::-1])
    )
    assert "65.0 %  \x1b[32m+25.0 points (+14.0 to +35.0) better\x1b[0m" in there
    assert "40.0 %  \x1b[33m-25.0 points (-35.0 to -14.0) worse\x1b[0m" in back


def test_changed_answers_are_printed_when_asked_for(runs: list[Manifest], terminal: Terminal):
    lines = terminal.said("compare", "base_eval@one", "base_eval@two", "--answers", "2")
    at = lines.index("  0: 0 (right) -> no (wrong)")
    assert lines[at + 1] == "  1: 0 (right) -> no (wrong)"
    assert lines[at + 2] == ""


def test_for_programs_there_are_all_of_them(runs: list[Manifest], terminal: Terminal):
    tree = terminal.read("compare", "one", "two", "one")
    [same, stage] = tree["stages"]
    sums = stage["scores"][0]
    assert sums["metric"] == "sums"
    assert sums["of"][1]["delta"]["clear"]
    assert sums["of"][2]["delta"]["value"] == 0
    assert not sums["of"][2]["delta"]["clear"]
    [task] = stage["answers"][1]
    assert (task["gained"], task["lost"], task["total"]) == (30, 5, 100)
    assert len(task["changed"]) == 70
    assert same["same"]
    assert stage["changes"] == [[], ["seed 0 -> 1"], []]


def test_a_run_that_lacks_a_stage_has_no_numbers_there(
    runs: list[Manifest], store: Store, terminal: Terminal
):
    put_run(store, "three", name="three")
    tree = terminal.read("compare", "one", "three", "two")
    [pretrain, base_eval] = tree["stages"]
    assert not pretrain["same"]
    assert base_eval["scores"][0]["of"][1] is None
    assert base_eval["scores"][0]["of"][2]["delta"]["clear"]
    assert base_eval["answers"][1] == []
    tree = terminal.read("compare", "three", "one")
    assert all(
        "delta" not in (cell or {}) for s in tree["stages"] for r in s["scores"] for cell in r["of"]
    )


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ([], "compare needs at least two", "nanochat compare main mine"),
        (["one"], "compare needs at least two", "nanochat compare main mine"),
        (["one", "base_eval@two"], "one is a run and base_eval@two is an artifact", "sft@one"),
        (["base_eval@two", "one"], "one is a run and base_eval@two is an artifact", "sft@one"),
        (
            ["base_eval@one", "pretrain@two"],
            "of different stages: base_eval, pretrain",
            "one stage",
        ),
        (["one", "nobody"], "nobody", ""),
    ],
)
def test_mistakes_are_answered_in_a_line(
    runs: list[Manifest], terminal: Terminal, words: list[str], said: str, hint: str
):
    error, told = terminal.fails("compare", *words)
    assert said in error
    assert hint in told


def test_what_measured_nothing_is_said(store: Store, terminal: Terminal):
    put_run(store, "a", put_measured(store, "shards"), name="a")
    lines = terminal.said("compare", "a", "a")
    assert lines[0] == "nothing that they made measured anything"
    assert lines[-1] == "there is no difference"


# Questions that are not the same.


def asked(store: Store, seed: int, *, suite: str | None, prompt: str = "1 + 1?") -> Manifest:
    """Of two tasks, the prompt of the second one given."""
    return put_measured(
        store,
        "chat_eval_sft",
        config={"seed": seed},
        metrics={"sums": seed / 2, "words": seed / 2},
        examples=[
            {"task": task, "place": 0, "prompt": text, "answer": str(seed), "correct": seed > 0}
            for task, text in (("sums", "say a"), ("words", prompt))
        ],
        scores={"suite": suite},
    )


def test_answers_to_another_suite_are_not_paired(store: Store, terminal: Terminal):
    for number, suite in enumerate(("a" * 64, "b" * 64, "a" * 64)):
        put_run(store, f"r{number}", asked(store, number, suite=suite), name=f"r{number}")
    lines = terminal.said("compare", "r0", "r1", "r2")
    at = next(number for number, line in enumerate(lines) if line.startswith("SFT: r1"))
    assert lines[at : at + 3] == [
        "SFT: r1 was not asked what r0 was: their suites are aaaaaaaaaaaa and bbbbbbbbbbbb",
        "SFT sums: r2 gained 1 and lost 0 of 1 questions; 1 answers changed",
        "SFT words: r2 gained 1 and lost 0 of 1 questions; 1 answers changed",
    ]
    [stage] = terminal.read("compare", "r0", "r1", "r2")["stages"]
    assert [len(tasks) for tasks in stage["answers"]] == [0, 0, 2]
    assert [bool(reason) for reason in stage["not_paired"]] == [False, True, False]


def test_a_question_with_another_text_is_not_the_same_question(store: Store, terminal: Terminal):
    for number, prompt in enumerate(("1 + 1?", "1 + 2?")):
        put_run(store, f"r{number}", asked(store, number, suite=None, prompt=prompt), name="r")
    lines = terminal.said("compare", "r0", "r1")
    at = next(number for number, line in enumerate(lines) if line.startswith("SFT: r1"))
    assert lines[at : at + 2] == [
        "SFT: r1 was not asked what r0 was: the questions differ in words",
        "SFT sums: r1 gained 1 and lost 0 of 1 questions; 1 answers changed",
    ]


# What is not the same.

OLD = {
    "config": {"sft": {"num_epochs": 1}},
    "code": {"nanochat_core.train.sft": "1"},
    "files": {"model": "x" * 1500, "config.json": "{}"},
    "git_commit": "1" * 40,
}
NEW = {
    "config": {"sft": {"num_epochs": 2}},
    "code": {"nanochat_core.train.sft": "2"},
    "files": {"model": "y" * 1600, "config.json": "{}", "extra": "1"},
}


@pytest.fixture
def pair(store: Store) -> tuple[Manifest, Manifest]:
    """Two SFT models that were trained differently, on different mid models."""
    made: list[Manifest] = []
    for n, facts in enumerate((OLD, NEW), start=1):
        mid = make_manifest("midtrain", config={"n": n}, files={"data": str(n)})
        sft = make_manifest("sft", inputs={"midtrain": mid}, run=f"tiny-{n}", **facts)
        put_artifact(store, mid)
        made.append(put_artifact(store, sft))
    return made[0], made[1]


def test_two_artifacts_differ_in_what_they_are_made_from_and_in_what_they_hold(
    pair: tuple[Manifest, Manifest], terminal: Terminal
):
    old, new = pair
    lines = terminal.said("compare", old.name, new.name)
    mids = [each.inputs["midtrain"].fingerprint[:12] for each in pair]
    assert f"{age(CREATED)}  run tiny-1  commit {'1' * 12}" in lines[-8]
    assert [line.split(maxsplit=1)[0] for line in lines[-5:]] == [new.name] * 5
    assert [" ".join(line.split()[1:]) for line in lines[-5:]] == [
        "setting sft.num_epochs 1 -> 2",
        "code nanochat_core.train.sft changed",
        f"input midtrain {mids[0]} -> {mids[1]}",
        "file extra added, 1 bytes",
        "file model 1,500 bytes -> 1,600 bytes",
    ]
    [tree] = terminal.read("compare", old.name, new.name)["differences"]
    assert (tree["old"], tree["new"]) == (old.fingerprint, new.fingerprint)
    assert tree["changes"][0]["name"] == "sft.num_epochs"
    assert [change["path"] for change in tree["files"]] == ["extra", "model"]


def test_an_artifact_is_the_same_by_every_name_and_the_exit_code_says_so(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    old, new = pair
    put_run(store, "tiny-1", old)
    code, lines = terminal.run("compare", "sft@tiny-1", old.name, "--exit-code")
    assert (code, lines[-1]) == (0, "there is no difference")
    assert terminal.read("compare", "sft@tiny-1", old.name)["same"] is True
    assert terminal.run("compare", old.name, new.name)[0] == 0
    assert terminal.run("compare", old.name, new.name, "--exit-code")[0] == 3


def test_equal_bytes_and_an_input_that_was_built_twice_are_named(store: Store, terminal: Terminal):
    one, two = (put_artifact(store, make_manifest("sft", code={"m": c})) for c in "ab")
    assert terminal.said("compare", one.name, two.name)[-1].endswith("the same, to the byte")
    mids = [make_manifest("midtrain", files={"a": text}) for text in "12"]
    one, two = (put_artifact(store, make_manifest("sft", inputs={"midtrain": mid})) for mid in mids)
    said = terminal.said("compare", one.name, two.name)[-2].split()
    assert said[1:] == ["input", "midtrain", mids[0].digest[:12], "->", mids[1].digest[:12]]


def test_two_runs_differ_stage_by_stage(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    old, new = pair
    shards, tokens, rl = (
        put_artifact(store, make_manifest(name)) for name in ("shards", "tokens", "rl")
    )
    put_run(store, "one", shards, tokens, old, status="failed")
    put_run(store, "two", shards, new, rl, name="best", overrides=("sft.num_epochs=2",))
    assert terminal.said("compare", "one", "two")[-6:] == [
        f"one  failed    {age(CREATED)}  nanochat run tiny",
        f"two  finished  {age(CREATED)}  nanochat run tiny --set sft.num_epochs=2 --name best",
        "",
        f"two  -  tokens  {tokens.fingerprint[:12]}                  only in the first",
        f"two  ~  sft     {old.fingerprint[:12]} -> {new.fingerprint[:12]}  "
        "sft.num_epochs 1 -> 2, code nanochat_core.train.sft changed, input midtrain changed",
        f"two  +  rl      {rl.fingerprint[:12]}                  not in the first",
    ]
    tree = terminal.read("compare", "one", "two")
    assert [(each["stage"], each["state"]) for each in tree["differences"]] == [
        *(("tokens", "-"), ("sft", "~"), ("rl", "+"))
    ]
    assert tree["made"][1]["overrides"] == ["sft.num_epochs=2"]


def test_an_unknown_reason_is_called_unknown(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    for name, made in zip(("one", "two"), pair, strict=True):
        put_run(store, name, made)
    store.delete(key := f"{pair[0].ref.prefix}/manifest.json")
    assert terminal.said("compare", "one", "two")[-1].endswith(f"{pair[0].name} is gone or damaged")
    store.put(key, b"x")
    lines = terminal.said("compare", "one", "two", warns="file://")
    assert lines[-1].endswith(f"{pair[0].name} is gone or damaged")


def test_a_damaged_artifact_of_both_runs_is_warned_of_once(
    runs: list[Manifest], store: Store, terminal: Terminal
):
    keys = [entry.key for entry in store.list("pretrain/") if "manifest" in entry.key]
    store.put(keys[0], b"x")
    terminal.said("compare", "one", "two", warns="file://")
