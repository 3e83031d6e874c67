"""A run of a chat stage that could only be wasted stops, or warns, early and with a clear line."""

import json
import math
import shutil

import pytest
import torch

from nanochat_core.errors import DataError, ModelError
from nanochat_core.model.checkpoint import load_config, load_model, load_state
from nanochat_core.runtime.progress import read_events
from nanochat_core.tokenizer import chat
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.loop import sanity_checks
from nanochat_core.train.loop.fixed_text import fixed_text_digest
from nanochat_core.train.loop.lineage import FILE, check_lineage
from nanochat_core.train.loop.sanity_checks import FIRST_STEPS, warn_of_rewards
from tasks.base import one_turn
from tests.support.nanochat_core.train.fixtures import Bench

pytestmark = pytest.mark.torch
INPUT = {"midtrain": "pretrain", "sft": "midtrain", "rl": "sft"}
every_stage = pytest.mark.parametrize("stage", INPUT)


def with_other_tokenizer(source, target):
    """Copy a model, with another tokenizer of the same size: of the same bytes, numbered from the
    end. Everything works, and nothing means what it did."""
    shutil.copytree(source, target)
    tokenizer = Tokenizer.load(source / "tokenizer")
    last = tokenizer.bos - 1
    other = Tokenizer({tokenizer.decode_bytes([i]): last - i for i in range(last + 1)})
    other.save(target / "tokenizer")
    assert Tokenizer.load(target / "tokenizer").vocab_size == load_config(source)[0].vocab_size
    return target


@every_stage
def test_a_model_with_another_tokenizer_is_not_trained_on(bench, tmp_path, stage):
    model = with_other_tokenizer(bench.models[INPUT[stage]], tmp_path / "model")
    job = bench.job(stage, inputs={INPUT[stage]: model})
    with pytest.raises(ModelError, match=r"was trained with tokenizer [0-9a-f]{12}, this is") as e:
        bench.run(job)
    assert e.value.hint is not None
    assert not any(job.output.iterdir())


@pytest.fixture
def layout():
    """Return the digest of the chat layout as it is."""
    yield lambda: (sanity_checks.chat_layout.cache_clear(), sanity_checks.chat_layout())[1]
    sanity_checks.chat_layout.cache_clear()


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_model_taught_with_another_chat_layout_is_not_trained_on(
    bench, monkeypatch, layout, stage
):
    changed = {**chat.WRAPPED, "python": ("<|python_start|>", "<|python_end|>", 0)}
    monkeypatch.setattr(chat, "WRAPPED", changed)
    layout()
    job = bench.job(stage)
    with pytest.raises(ModelError, match=r"was trained with chat layout [0-9a-f]{12}, this is"):
        bench.run(job)
    assert not any(job.output.iterdir())


def test_the_layout_shows_a_change_of_any_part_of_it(monkeypatch, layout):
    changes = [
        ("USER", ("<|user_end|>", "<|user_start|>")),
        ("ASSISTANT", ("<|assistant_start|>", "<|bos|>")),
        ("WRAPPED", {**chat.WRAPPED, "python_output": ("<|output_start|>", "<|bos|>", 0)}),
        ("WRAPPED", {**chat.WRAPPED, "python_output": ("<|output_start|>", "<|output_end|>", 1)}),
    ]
    found = {layout()}
    for name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(chat, name, value)
            found.add(layout())
    assert len(found) == 1 + len(changes)


def test_facts_that_cannot_be_read_are_named(tmp_path):
    ours = {"tokenizer": "1" * 64, "layout": "2" * 64}
    check_lineage(tmp_path, **ours)  # a model from elsewhere has none
    for text in ("{", "[]", "{}", '{"tokenizer": 5, "layout": null}', '{"tokenizer": "11"}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ModelError, match=r"taught\.json cannot be read"):
            check_lineage(tmp_path, **ours)


@pytest.fixture(scope="session")
def confident(tmp_path_factory):
    """Train a chat model that is sure of sums and spelling, and knows nothing else."""
    names = ("arithmetic", "spelling")
    mixture = [{"task": name, "num_examples": 40, "epochs": 60} for name in names]
    bench = Bench(tmp_path_factory, tmp_path_factory.mktemp("confident"))
    job, metrics = bench.done("midtrain", section={"mixture": mixture})
    assert metrics["val_loss"] < 0.5 * math.log(512)
    return job.output


def with_record(source, target, record):
    """Copy a model with its record, without the loss in it, of another text, or without one."""
    shutil.copytree(source, target)
    facts = json.loads((target / FILE).read_text())
    assert facts["loss"] > 0
    other_text = {"loss": 99.0, "text": "0" * 64}
    changes = {"without a loss": {"loss": None}, "of another text": other_text}
    if record == "none":
        (target / FILE).unlink()
    else:
        (target / FILE).write_text(json.dumps({**facts, **changes.get(record, {})}))
    return target


@pytest.mark.parametrize("record", ["whole", "without a loss", "of another text", "none"])
def test_a_healthy_model_trains_on_chats_of_which_it_knows_nothing(
    bench, tmp_path, confident, record
):
    """It is worse than guessing on them, and far from wrong."""
    model = with_record(confident, tmp_path / "model", record)
    data = shutil.copytree(bench.models["task_data"], tmp_path / "task_data")
    for split in ("train", "test"):
        chats = (one_turn(f"??? {i}", f"#@!~ ^&*() ZZZQ 0xDEADBEEF {i}") for i in range(40))
        lines = "".join(json.dumps(chat) + "\n" for chat in chats)
        (data / "arithmetic" / f"{split}.jsonl").write_text(lines)
    job, metrics = bench.done("sft", inputs={"task_data": data, "midtrain": model})
    assert metrics["val_loss_first"] > 1.1 * math.log(512)
    assert metrics["val_loss"] < metrics["val_loss_first"]
    warned = any("no stage recorded" in text for text in bench.messages(job))
    assert warned == (record != "whole")


def test_weights_of_another_model_are_refused_by_what_theirs_reached(bench, tmp_path, confident):
    """The tokenizer is the recorded one: the loss alone gives them away."""
    model = shutil.copytree(confident, tmp_path / "model")
    shutil.copyfile(bench.models["pretrain"] / "model.safetensors", model / "model.safetensors")
    with pytest.raises(ModelError, match=r"on a fixed text is .* made the model measured"):
        bench.done("sft", inputs={"midtrain": model})


@pytest.mark.parametrize("change", [{"softcap": 6.0}, {"softcap": 30.0}, {"gate_scale": 60.0}])
def test_other_constants_of_the_arithmetic_are_refused(confident, tmp_path, change):
    def check(directory):
        model = load_model(directory, torch.device("cpu"))
        sanity_checks.check_fit(directory, model, tokenizer, log=pytest.fail)

    tokenizer = Tokenizer.load(confident / "tokenizer")
    check(confident)
    changed = shutil.copytree(confident, tmp_path / "model")
    tree = json.loads((changed / "config.json").read_text())
    assert tree["numerics"].keys() >= change.keys()
    text = json.dumps({**tree, "numerics": {**tree["numerics"], **change}})
    (changed / "config.json").write_text(text)
    with pytest.raises(ModelError, match="on a fixed text is"):
        check(changed)


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_a_mixture_without_a_supervised_token_is_refused(bench, tmp_path, stage):
    data = shutil.copytree(bench.models["task_data"], tmp_path / "task_data")
    line = json.dumps({"messages": [{"role": "user", "content": "and?"}]}) + "\n"
    for path in (data / "arithmetic").iterdir():
        path.write_text(line * len(path.read_text(encoding="utf-8").splitlines()))
    mixture = [{"task": "arithmetic", "num_examples": 4, "epochs": 1}]
    with pytest.raises(DataError, match="no token to learn from"):
        bench.done(stage, inputs={"task_data": data}, section={"mixture": mixture})


def test_a_mixture_without_a_conversation_to_test_with_is_refused(bench, tmp_path):
    data = shutil.copytree(bench.models["task_data"], tmp_path / "task_data")
    (data / "arithmetic" / "test.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="no conversation to test with") as error:
        bench.done("sft", inputs={"task_data": data})
    assert "num_test" in (error.value.hint or "")


@pytest.mark.parametrize(("reward", "word"), [(0.0, "easier"), (1.0, "harder")])
def test_rewards_that_are_all_alike_are_warned_of_once(bench, monkeypatch, reward, word):
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [reward == 1.0] * len(graded))
    section = {"num_steps": FIRST_STEPS + 4, "max_new_tokens": 2, "samples_per_example": 2}
    job, _ = bench.done("rl", section=section)
    events = list(read_events(job.events))
    [place] = [i for i, e in enumerate(events) if "warning" in e.get("text", "")]
    assert f"got reward {reward:g}" in events[place]["text"]
    assert word in events[place]["text"]
    assert [e["kind"] for e in events[:place]].count("step") == FIRST_STEPS
    assert len(bench.values(job)) == FIRST_STEPS + 4


@pytest.mark.parametrize(
    ("rewards", "warned"),
    [
        ([0.0] * (FIRST_STEPS - 1) + [0.01], False),
        ([0.5] * FIRST_STEPS, False),
        ([1.0, 0.0] * (FIRST_STEPS // 2), False),
        ([0.0] * (FIRST_STEPS - 1), False),
        ([0.0] * (FIRST_STEPS + 1), False),  # warned of before
        ([0.0] * FIRST_STEPS, True),
    ],
)
def test_only_rewards_that_are_all_alike_are_warned_of(rewards, warned):
    assert (warn_of_rewards(rewards) is not None) == warned


def test_a_model_says_what_it_was_taught_with(bench):
    for stage in ("pretrain", "midtrain", "sft"):
        facts = json.loads((bench.models[stage] / FILE).read_text())
        digest = Tokenizer.load(bench.models[stage] / "tokenizer").digest()
        layout = None if stage == "pretrain" else sanity_checks.chat_layout()
        assert facts.pop("loss") == pytest.approx(math.log(512), rel=0.5)
        assert facts.pop("text") == fixed_text_digest()
        assert facts == {"format": 2, "tokenizer": digest, "layout": layout}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\noid", "", "{}"])
def test_weights_that_are_a_pointer_of_git_lfs_say_how_to_get_them(bench, tmp_path, name, content):
    model = shutil.copytree(bench.models["pretrain"], tmp_path / "model")
    (model / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} cannot be read: ") as error:
        load_state(model)
    assert ("is a pointer of Git LFS" in str(error.value)) == ("git-lfs" in content)
    assert ("git lfs pull" in (error.value.hint or "")) == ("git-lfs" in content)
