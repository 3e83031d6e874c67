"""A run of a chat stage that could only be wasted stops, or warns, early and with a clear line."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from nanochat_core.errors import DataError, ModelError
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_config, load_model, load_state
from nanochat_core.runtime.progress import last_by_step, read_events
from nanochat_core.tokenizer import chat
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.loop import sanity_checks
from nanochat_core.train.loop.fixed_text import fixed_text_digest
from nanochat_core.train.loop.lineage import FILE, check_lineage
from nanochat_core.train.loop.sanity_checks import FIRST_STEPS, warn_of_rewards
from tasks.base import one_turn

pytestmark = pytest.mark.torch
RunStage: TypeAlias = Callable[[Job], dict[str, Any]]
MakeJob: TypeAlias = Callable[..., Job]
INPUT = {"midtrain": "pretrain", "sft": "midtrain", "rl": "sft"}


def with_other_tokenizer(models: dict[str, Path], stage: str, directory: Path) -> dict[str, Path]:
    """The inputs of a stage, its model's tokenizer being another of the same size."""
    source = models[INPUT[stage]]
    copy = directory / "model"
    shutil.copytree(source, copy)
    size = load_config(source)[0].vocab_size
    # Of the same bytes, numbered from the end: everything works, and nothing means what it did.
    tokenizer = Tokenizer.load(source / "tokenizer")
    first_special = tokenizer.bos
    words = {tokenizer.decode_bytes([i]): first_special - 1 - i for i in range(first_special)}
    Tokenizer(words).save(copy / "tokenizer")
    assert Tokenizer.load(copy / "tokenizer").vocab_size == size
    return {**models, INPUT[stage]: copy}


@pytest.mark.parametrize("stage", ["midtrain", "sft", "rl"])
def test_a_model_with_another_tokenizer_is_not_trained_on(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path, stage: str
) -> None:
    job = make_job(stage, tmp_path / "job", with_other_tokenizer(models, stage, tmp_path))
    with pytest.raises(ModelError, match=r"was trained with tokenizer [0-9a-f]{12}, this is") as e:
        run_stage(job)
    assert e.value.hint is not None
    assert not any(job.output.iterdir())


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_model_taught_with_another_chat_layout_is_not_trained_on(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    changed = {**chat.WRAPPED, "python": ("<|python_start|>", "<|python_end|>", 0)}
    monkeypatch.setattr(chat, "WRAPPED", changed)
    sanity_checks.chat_layout.cache_clear()
    job = make_job(stage, tmp_path, models)
    try:
        with pytest.raises(ModelError, match=r"was trained with chat layout [0-9a-f]{12}, this is"):
            run_stage(job)
    finally:
        sanity_checks.chat_layout.cache_clear()
    assert not any(job.output.iterdir())


def test_facts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    ours = {"tokenizer": "1" * 64, "layout": "2" * 64}
    check_lineage(tmp_path, **ours)  # a model from elsewhere has none
    wrong = ("{", "[]", "{}", '{"tokenizer": 5, "layout": null}', '{"tokenizer": "11"}')
    for text in wrong:
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ModelError, match=r"taught\.json cannot be read"):
            check_lineage(tmp_path, **ours)


def test_the_layout_shows_a_change_of_any_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {sanity_checks.chat_layout()}
    changes: list[tuple[str, Any]] = [
        ("USER", ("<|user_end|>", "<|user_start|>")),
        ("ASSISTANT", ("<|assistant_start|>", "<|bos|>")),
        ("WRAPPED", {**chat.WRAPPED, "python_output": ("<|output_start|>", "<|bos|>", 0)}),
        ("WRAPPED", {**chat.WRAPPED, "python_output": ("<|output_start|>", "<|output_end|>", 1)}),
    ]
    for name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(chat, name, value)
            sanity_checks.chat_layout.cache_clear()
            found.add(sanity_checks.chat_layout())
    sanity_checks.chat_layout.cache_clear()
    assert len(found) == 1 + len(changes)


@pytest.fixture(scope="session")
def confident(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A chat model that is sure of sums and spelling, and knows nothing else."""
    folder = tmp_path_factory.mktemp("confident")
    names = ("arithmetic", "spelling")
    mixture = [{"task": name, "num_examples": 40, "epochs": 60} for name in names]
    job = make_job("midtrain", folder, models, section={"mixture": mixture})
    assert run_stage(job)["val_loss"] < 0.5 * math.log(512)
    return job.output


STYLES = {
    "customers": (
        "Where is my order?",
        "It left our warehouse on Monday; here is the parcel number.",
    ),
    "german": (
        "Wie sp\u00e4t ist es?",
        "Es ist kurz nach halb neun, und der Zug f\u00e4hrt gleich.",
    ),
    "code": ("reverse a list", "def reverse(items):\n    return items[::-1]\n"),
    "chinese": ("\u4f60\u597d\u5417?", "\u6211\u5f88\u597d\uff0c\u8c22\u8c22\u4f60\u3002"),
    "noise": ("???", "#@!~ ^&*() {}|<> ZZZQ 0xDEADBEEF \\\\ //"),
}


@pytest.mark.parametrize("record", ["whole", "without a loss", "of another text", "none"])
@pytest.mark.parametrize("style", STYLES)
def test_a_healthy_model_is_trained_on_chats_of_any_style(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    confident: Path,
    style: str,
    record: str,
) -> None:
    """Worse than guessing on them, it is far from wrong."""
    model = with_record(confident, tmp_path / "model", record)
    data = shutil.copytree(models["task_data"], tmp_path / "task_data")
    question, answer = STYLES[style]
    for split in ("train", "test"):
        lines = (json.dumps(one_turn(f"{question} {i}", f"{answer} {i}")) + "\n" for i in range(40))
        (data / "arithmetic" / f"{split}.jsonl").write_text("".join(lines))
    job = make_job("sft", tmp_path / "job", {**models, "task_data": data, "midtrain": model})
    metrics = run_stage(job)
    assert metrics["val_loss_first"] > 1.1 * math.log(512)  # and was refused for it
    assert metrics["val_loss"] < metrics["val_loss_first"]
    messages = [e["text"] for e in read_events(job.events) if e["kind"] == "message"]
    assert any("no stage recorded" in text for text in messages) == (record != "whole")


@pytest.mark.parametrize("stage", ["midtrain", "sft", "rl"])
def test_a_model_without_a_record_is_trained_on_whatever_it_knows(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    confident: Path,
    stage: str,
) -> None:
    """English is noise to it, as to a model of another language."""
    inputs = with_other_tokenizer({**models, INPUT[stage]: confident}, stage, tmp_path)
    (inputs[INPUT[stage]] / FILE).unlink()
    run_stage(make_job(stage, tmp_path / "job", inputs))


def with_record(source: Path, directory: Path, record: str) -> Path:
    """Copy a model with its record, without the loss in it, of another text, or without one."""
    shutil.copytree(source, directory)
    facts = json.loads((directory / FILE).read_text())
    assert facts["loss"] > 0
    if record == "without a loss":
        (directory / FILE).write_text(json.dumps({**facts, "loss": None}))
    elif record == "of another text":
        (directory / FILE).write_text(json.dumps({**facts, "loss": 99.0, "text": "0" * 64}))
    elif record == "none":
        (directory / FILE).unlink()
    return directory


def test_weights_of_another_model_are_refused_by_what_theirs_reached(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path, confident: Path
) -> None:
    """The tokenizer is the recorded one: the loss alone gives them away."""
    model = shutil.copytree(confident, tmp_path / "model")
    shutil.copyfile(models["pretrain"] / "model.safetensors", model / "model.safetensors")
    job = make_job("sft", tmp_path / "job", {**models, "midtrain": model})
    with pytest.raises(ModelError, match=r"on a fixed text is .* made the model measured"):
        run_stage(job)


@pytest.mark.parametrize("change", [{"softcap": 6.0}, {"softcap": 30.0}, {"gate_scale": 60.0}])
def test_other_constants_of_the_arithmetic_are_refused(
    confident: Path, tmp_path: Path, change: dict[str, float]
) -> None:
    model = load_model(confident, torch.device("cpu"))
    tokenizer = Tokenizer.load(confident / "tokenizer")
    sanity_checks.check_fit(confident, model, tokenizer, log=pytest.fail)
    shutil.copytree(confident, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    tree = json.loads(path.read_text())
    assert tree["numerics"].keys() >= change.keys()
    path.write_text(json.dumps({**tree, "numerics": {**tree["numerics"], **change}}))
    model = load_model(tmp_path / "model", torch.device("cpu"))
    with pytest.raises(ModelError, match="on a fixed text is"):
        sanity_checks.check_fit(tmp_path / "model", model, tokenizer, log=pytest.fail)


def test_a_model_that_knows_nothing_is_good_enough(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    """One of six steps: the gate must not be tighter than guessing."""
    base = with_record(models["pretrain"], tmp_path / "model", "none")
    job = make_job("midtrain", tmp_path / "job", {**models, "pretrain": base})
    assert run_stage(job)["val_loss_first"] > 0.9 * math.log(512)


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_a_mixture_without_a_supervised_token_is_refused(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path, stage: str
) -> None:
    data = tmp_path / "task_data"
    shutil.copytree(models["task_data"], data)
    only_asked = {"messages": [{"role": "user", "content": "and?"}]}
    files = list(data.rglob("arithmetic*"))
    files = [f for path in files for f in (path.rglob("*") if path.is_dir() else [path])]
    for path in files:
        if path.is_file():
            lines = len(path.read_text(encoding="utf-8").splitlines())
            path.write_text((json.dumps(only_asked) + "\n") * lines, encoding="utf-8")
    mixture = [{"task": "arithmetic", "num_examples": 4, "epochs": 1}]
    job = make_job(
        stage, tmp_path / "job", {**models, "task_data": data}, section={"mixture": mixture}
    )
    with pytest.raises(DataError, match="no token to learn from"):
        run_stage(job)


def test_a_mixture_without_a_conversation_to_test_with_is_refused(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    data = shutil.copytree(models["task_data"], tmp_path / "task_data")
    (data / "arithmetic" / "test.jsonl").write_bytes(b"")
    job = make_job("sft", tmp_path / "job", {**models, "task_data": data})
    with pytest.raises(DataError, match="no conversation to test with") as error:
        run_stage(job)
    assert "num_test" in (error.value.hint or "")


@pytest.mark.parametrize(("reward", "word"), [(0.0, "easier"), (1.0, "harder")])
def test_rewards_that_are_all_alike_are_warned_of_once(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: float,
    word: str,
) -> None:
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [reward == 1.0] * len(graded))
    steps = FIRST_STEPS + 4
    section = {"num_steps": steps, "max_new_tokens": 2, "samples_per_example": 2}
    job = make_job("rl", tmp_path, models, section=section)
    run_stage(job)
    events = list(read_events(job.events))
    warnings = [e["text"] for e in events if "warning" in e.get("text", "")]
    [warning] = warnings
    assert f"got reward {reward:g}" in warning
    assert word in warning
    place = next(i for i, e in enumerate(events) if e.get("text") == warning)
    assert [e["kind"] for e in events[:place]].count("step") == FIRST_STEPS
    assert len(last_by_step(iter(events), "step")) == steps


def test_rewards_that_differ_are_not_warned_of() -> None:
    for rewards in ([0.0] * (FIRST_STEPS - 1) + [0.01], [0.5] * FIRST_STEPS, [1.0, 0.0] * 5):
        assert len(rewards) == FIRST_STEPS
        assert warn_of_rewards(rewards) is None
    assert warn_of_rewards([0.0] * (FIRST_STEPS - 1)) is None
    assert warn_of_rewards([0.0] * (FIRST_STEPS + 1)) is None  # said before
    assert warn_of_rewards([0.0] * FIRST_STEPS) is not None


def test_a_model_says_what_it_was_taught_with(models: dict[str, Path]) -> None:
    for stage in ("pretrain", "midtrain", "sft"):
        facts = json.loads((models[stage] / FILE).read_text())
        digest = Tokenizer.load(models[stage] / "tokenizer").digest()
        layout = None if stage == "pretrain" else sanity_checks.chat_layout()
        assert facts.pop("loss") == pytest.approx(math.log(512), rel=0.5)
        assert facts.pop("text") == fixed_text_digest()
        assert facts == {"format": 2, "tokenizer": digest, "layout": layout}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\noid", "", "{}"])
def test_weights_that_are_a_pointer_of_git_lfs_say_how_to_get_them(
    models: dict[str, Path], tmp_path: Path, name: str, content: str
) -> None:
    model = shutil.copytree(models["pretrain"], tmp_path / "model")
    (model / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} cannot be read: ") as error:
        load_state(model)
    assert ("is a pointer of Git LFS" in str(error.value)) == ("git-lfs" in content)
    assert ("git lfs pull" in (error.value.hint or "")) == ("git-lfs" in content)
