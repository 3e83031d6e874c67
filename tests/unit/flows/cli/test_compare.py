"""`nanochat compare`: what differs, numbers with intervals, answers that changed."""

import pytest

from flows.compare.compare import delta_between
from flows.identity.fingerprint import fingerprint_of
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


def put_scores(store, seed, right):
    share = sum(right) / len(right)
    bounds = {"sums_low": share - 0.1, "sums_high": share + 0.1}
    return put_measured(
        store,
        "base_eval",
        config={"seed": seed},
        metrics={"sums": share, **bounds, "val_bpb": 1.0 + seed / 8},
        examples=[
            {"task": "sums", "place": i, "answer": str(seed if ok else "no"), "correct": ok}
            for i, ok in enumerate(right)
        ],
    )


@pytest.fixture
def runs(store):
    """The second answers 30 of 100 questions right that the first does not, and loses 5."""
    model = put_measured(store, "pretrain", metrics={"val_bpb": 1.5})
    first = put_scores(store, 0, [i < 40 for i in range(100)])
    second = put_scores(store, 1, [5 <= i < 70 for i in range(100)])
    put_run(store, "one", model, first, name="one")
    put_run(store, "two", model, second, name="two")


@pytest.mark.usefixtures("runs")
def test_scores_stand_side_by_side_with_what_changed(terminal):
    terminal.shows("compare one two")
    terminal.shows("compare base_eval@one base_eval@two --answers 2")


def test_less_is_better_of_losses_and_counts_are_written_alike(store, terminal):
    for seed, (bpb, tokens) in enumerate(((1.0, 40_960), (1.2, 245_760), (0.9, 1_186_917_580_800))):
        bounds = {"val_bpb": bpb, "val_bpb_low": bpb - 0.01, "val_bpb_high": bpb + 0.01}
        config = {"seed": seed}
        made = [
            put_measured(store, "base_eval", config=config, metrics=bounds),
            put_measured(store, "pretrain", config=config, metrics={"tokens": tokens}),
            put_measured(store, "report", config=config, metrics={"bytes": seed}),
        ]
        put_run(store, f"r{seed}", *made, name=f"r{seed}")
    terminal.shows("compare r0 r1 r2 r0")
    stages = [stage["stage"] for stage in terminal.read("compare", "r0", "r1")["stages"]]
    assert stages == ["pretrain", "base_eval", "report"]


@pytest.mark.usefixtures("runs")
def test_a_difference_has_the_colour_of_its_verdict(terminal, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    there = "\n".join(terminal.said("compare", "one", "two"))
    back = "\n".join(terminal.said("compare", "two", "one"))
    assert "65.0 %  \x1b[32m+25.0 points (+14.0 to +35.0) better\x1b[0m" in there
    assert "40.0 %  \x1b[33m-25.0 points (-35.0 to -14.0) worse\x1b[0m" in back


@pytest.mark.usefixtures("runs")
def test_for_programs_there_are_all_of_them(terminal):
    tree = terminal.read("compare", "one", "two", "one")
    [same, stage] = tree["stages"]
    sums = stage["scores"][0]
    assert sums["metric"] == "sums"
    assert "delta" not in sums["of"][0]
    assert sums["of"][1]["delta"]["clear"]
    assert sums["of"][2]["delta"]["value"] == 0
    assert not sums["of"][2]["delta"]["clear"]
    [task] = stage["answers"][1]
    assert (task["gained"], task["lost"], task["total"]) == (30, 5, 100)
    assert len(task["changed"]) == 70
    assert same["same"]
    assert [change["name"] for change in tree["differences"][0]["changes"]] == ["seed"]


@pytest.mark.usefixtures("runs")
def test_a_run_that_lacks_a_stage_has_no_numbers_there(store, terminal):
    put_run(store, "three", name="three")
    terminal.shows("compare one three two")
    terminal.shows("compare three one")
    [_, base_eval] = terminal.read("compare", "one", "three", "two")["stages"]
    assert (base_eval["scores"][0]["of"][1], base_eval["answers"][1]) == (None, [])


def test_that_nothing_was_measured_is_reported(store, terminal):
    put_run(store, "a", put_measured(store, "shards"), name="a")
    terminal.shows("compare a a")


def test_scores_that_are_no_object_are_an_error_and_a_difference_is_then_not_of_pairs(
    store, terminal
):
    ends = {"sums": 0.5, "sums_low": 0.4, "sums_high": 0.6}
    old, new = (
        put_measured(store, "base_eval", config={"seed": seed}, metrics=ends, scores=[1])
        for seed in (0, 1)
    )
    terminal.shows(f"compare {old.name} {new.name}", code=1)
    delta = delta_between(store, old, new, "sums")  # as the check for a regression asks
    assert (delta.value, delta.is_clear) == (0.0, False)
    assert delta.low is not None


# Questions that are not the same.


def ask(store, seed, *, suite, prompt="1 + 1?"):
    """Put answers to two questions, one for each task; the second has this prompt."""
    made = put_measured(
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
    put_run(store, f"r{seed}", made, name=f"r{seed}")


def test_answers_to_another_suite_are_not_paired(store, terminal):
    for number, suite in enumerate(("a" * 64, "b" * 64, "a" * 64)):
        ask(store, number, suite=suite)
    terminal.shows("compare r0 r1 r2")


def test_a_question_with_another_text_is_not_the_same_question(store, terminal):
    for number, prompt in enumerate(("1 + 1?", "1 + 2?")):
        ask(store, number, suite=None, prompt=prompt)
    terminal.shows("compare r0 r1")


# What is not the same.

OLD = {
    "config": {"sft": {"num_epochs": 1}},
    "code": {"nanochat_core.train.sft": "1"},
    "files": {"model": "x" * 1500, "config.json": "{}", "gone": "12"},
    "git_commit": "1" * 40,
}
NEW = {
    "config": {"sft": {"num_epochs": 2}},
    "code": {"nanochat_core.train.sft": "2"},
    "files": {"model": "y" * 1600, "config.json": "{}", "extra": "1"},
}


@pytest.fixture
def pair(store):
    """Two SFT models that were trained differently, on different mid models."""
    made = []
    for n, facts in enumerate((OLD, NEW), start=1):
        mid = make_manifest("midtrain", config={"n": n}, files={"data": str(n)})
        sft = make_manifest("sft", inputs={"midtrain": mid}, run=f"tiny-{n}", **facts)
        put_artifact(store, mid)
        made.append(put_artifact(store, sft))
    return made


def test_two_artifacts_differ_in_what_they_are_made_from_and_in_what_they_hold(
    pair, store, terminal
):
    old, new = pair
    put_run(store, "tiny-1", old)
    terminal.shows(f"compare {old.name} {new.name} --exit-code", code=3)
    terminal.shows(f"compare sft@tiny-1 {old.name} --exit-code")
    terminal.shows(f"compare {old.name} {new.name} --json")


def test_equal_bytes_and_an_input_that_was_built_twice_are_named(store, terminal):
    one, two = (put_artifact(store, make_manifest("sft", code={"m": c})) for c in "ab")
    terminal.shows(f"compare {one.name} {two.name}")
    mids = [make_manifest("midtrain", files={"a": text}) for text in "12"]
    one, two = (put_artifact(store, make_manifest("sft", inputs={"midtrain": mid})) for mid in mids)
    terminal.shows(f"compare {one.name} {two.name}")


def test_every_kind_of_cause_is_named(store, terminal):
    made = make_manifest("sft", code={"gone": "1"}, config={"sft": {"lr": 0.3, "gone": {"b": 1}}})
    names = []
    for change in (
        *({}, {"format": 2}, {"redo": 1}, {"code": {"new": "1"}}),
        {"config": {"sft": {"lr": 0.1 + 0.2, "new": {"a": [1, 2]}}}},  # 0.1 + 0.2 is not 0.3
    ):
        preimage = made.preimage | change
        facts = {"preimage": preimage, "fingerprint": fingerprint_of(preimage)}
        names.append(put_artifact(store, type(made)(**(vars(made) | facts))).name)
    for other in names[1:]:
        terminal.shows(f"compare {names[0]} {other}")


def test_two_runs_differ_stage_by_stage(pair, store, terminal):
    shards, tokens, rl = (
        put_artifact(store, make_manifest(name)) for name in ("shards", "tokens", "rl")
    )
    put_run(store, "one", shards, tokens, pair[0], status="failed")
    put_run(store, "two", shards, pair[1], rl, name="best", overrides=("sft.num_epochs=2",))
    terminal.shows("compare one two")
    tree = terminal.read("compare", "one", "two")
    assert [each["state"] for each in tree["differences"]] == ["-", "~", "+"]
    assert tree["made"][1]["overrides"] == ["sft.num_epochs=2"]


def test_a_reason_that_cannot_be_read_is_unknown_and_damage_is_warned_of_once(
    pair, store, terminal
):
    model = put_measured(store, "pretrain")
    for name, made in zip(("one", "two"), pair, strict=True):
        put_run(store, name, made, model)
    store.delete(key := f"{pair[0].ref.prefix}/manifest.json")
    terminal.shows("compare one two")
    store.put(key, b"x")
    store.put(f"{model.ref.prefix}/manifest.json", b"x")
    terminal.shows("compare one two")


# Curves of training.


def trained(store, seed, *, steps=96):
    """A model whose loss falls from 5 by 0.05 a step and more with the seed."""
    rows = [{"step": i + 1, "loss": 5.0 - i / 20 - seed / 2, "mfu": 0.4} for i in range(steps)]
    rows[-1]["val_bpb"] = 1.0 - seed / 8
    rows[0]["val_bpb"] = 3.0
    return put_measured(store, "pretrain", config={"seed": seed}, steps=rows)


@pytest.fixture
def trained_runs(store):
    for seed, name in enumerate(("one", "two")):
        put_run(store, name, trained(store, seed), name=name)
    put_run(store, "short", trained(store, 2, steps=48), name="short")
    put_run(store, "bare", put_measured(store, "pretrain", config={"seed": 9}), name="bare")


@pytest.mark.usefixtures("trained_runs")
def test_curves_stand_below_each_other_on_one_scale(terminal):
    terminal.shows("compare one two short bare")  # two is half a point below one throughout
    assert terminal.said("compare", "one", "one")[0] == "nothing that they made measured anything"


@pytest.mark.usefixtures("trained_runs")
def test_for_programs_there_are_the_points(terminal):
    [stage] = terminal.read("compare", "one", "bare")["stages"]
    loss, bpb = stage["curves"]
    assert loss["metric"] == "loss"
    assert loss["of"][0][:2] == [[1, 5.0], [2, 4.95]]
    assert loss["of"][1] == []
    assert bpb["of"][0] == [[1, 3.0], [96, 1.0]]


@pytest.mark.usefixtures("trained_runs")
def test_a_page_holds_scores_and_curves_and_nothing_else(terminal, tmp_path):
    words = ("compare", "one", "two", "--html", str(path := tmp_path / "page.html"))
    assert terminal.said(*words)[-1] == str(path)
    page = path.read_text(encoding="utf-8")
    assert "one, two" in page
    assert "Pretraining loss" in page
    assert page.count("<figure>") == 2
    assert page.count('stroke="var(--c1)"') >= 2
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".page")] == []
    terminal.said(*words)
    assert path.read_text(encoding="utf-8") == page


@pytest.mark.usefixtures("trained_runs")
def test_a_page_that_cannot_be_written_is_a_mistake(terminal, tmp_path):
    (tmp_path / "folder").mkdir()
    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    for path in (tmp_path / "nowhere" / "page.html", device, tmp_path / "folder"):
        terminal.refuses("compare", "one", "two", "--html", str(path))
    assert device.is_symlink()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_curve_with_no_finite_value_is_none_and_a_flat_one_in_the_middle(store, terminal):
    for loss in (float("nan"), 2.0):
        rows = [{"step": i, "loss": loss} for i in range(1, 4)]
        for name in ("one", "two"):
            facts = {"config": {"seed": f"{name} {loss}"}, "metrics": {"steps": 3}}
            put_run(store, name, put_measured(store, "sft", steps=rows, **facts), name=name)
        terminal.shows("compare one two")
