import dataclasses
from dataclasses import dataclass, field
from functools import partial

import pytest

from nanochat_core.config import DatasetConfig, ModelConfig, TaskDataConfig
from nanochat_core.eras import windows_of
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import model_for_depth, run_for_depth
from nanochat_core.section import NEUTRAL, Section, check_counts


@dataclass(frozen=True, kw_only=True)
class Text(Section):
    """A file, what it holds, and something that came later."""

    place: str = field(metadata={"identity": False})
    content: str
    later: int | None = 7  # its default was changed since it was added


@dataclass(frozen=True, kw_only=True)
class Texts(Section):
    texts: tuple[Text, ...]


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    """The table has the field of the test's own section."""
    monkeypatch.setitem(NEUTRAL, "Text.later", None)


HERE = Text(place="/here", content="x", later=None)


def test_where_something_lies_is_no_part_of_what_it_is():
    there = dataclasses.replace(HERE, place="/there")
    other = dataclasses.replace(HERE, content="y")
    one, same, different = (Texts(texts=(text,)).canonical() for text in (HERE, there, other))
    assert one == same == {"texts": [{"content": "x"}]}
    assert different != one
    assert Texts(texts=(there,)).tree()["texts"] == [
        {"place": "/there", "content": "x", "later": None}
    ]


def test_a_tree_from_before_a_field_existed_means_its_neutral_value():
    assert Text.from_tree({"place": "/here", "content": "x"}) == HERE
    assert Text.from_tree(HERE.tree()) == HERE
    assert "later" not in HERE.canonical()
    assert Text(place="/here", content="x").canonical() == {"content": "x", "later": 7}
    with pytest.raises(ConfigError, match="Text needs a value for 'content'"):
        Text.from_tree({"place": "/here", "later": 1})
    with pytest.raises(ConfigError, match="Text has no setting 'other'"):
        Text.from_tree({"place": "/here", "content": "x", "other": 1})


MODEL, RUN = model_for_depth(2), run_for_depth(12)
DATASET = DatasetConfig(name="letters", grade=1, num_train=None, num_test=0)
CANNOT_BE = [  # a section, one of its settings, and values that it cannot have
    *((MODEL, name, [0, -64, 2**31]) for name in ("depth", "width", "num_heads")),
    (MODEL, "num_kv_heads", [0, -1]),
    *((MODEL, name, [2**20 + 1]) for name in ("sequence_len", "vocab_size")),
    (MODEL, "windows", [[2048, -1], [2048, 2**31]]),
    (RUN.numerics, "precision", ["fp16", "tf32"]),
    *((RUN.numerics, name, [0.0]) for name in ("softcap", "rotary_base")),
    *((RUN.numerics, name, [value]) for name, value in (("smear_channels", 0), ("softcap", 30.5))),
    *((RUN.numerics, "gate_channels", [-12]), (RUN.numerics, "qk_scale", [1e300])),
    *((RUN.numerics, "norm_eps", [-1.0]), (RUN.numerics, "init_embedding_std", [-0.8])),
    *((RUN.optimizer, "muon", ["adam", "newton_schulz"]), (RUN.optimizer, "grad_clip", [0.0])),
    *((RUN.rl, "updates_per_batch", [2]), (RUN.rl, "clip", [0.0]), (RUN.rl, "kl_weight", [-0.1])),
    *((RUN.rl, "baseline", ["median"]), (RUN.rl, "rollout_precision", ["fp8"])),
    (RUN.rl, "samples_per_example", [1]),
    (DATASET, "name", ["", "a/b", "../a", "Letters", ".a", "a b", "-a"]),
]


def test_what_a_setting_cannot_be_is_refused_in_one_line(transcript):
    for section, name, values in CANNOT_BE:
        kind = type(section)
        for value in values:
            tree = section.tree() | {name: value}
            transcript.refused(
                f"{kind.__name__}.{name}={value!r}", ConfigError, kind.from_tree, tree
            )
    for pattern in ("", "SXL", "sl"):
        transcript.refused(f"windows {pattern!r}", ConfigError, windows_of, pattern, 4, 256)
    datasets = [DATASET.tree()] * 2
    transcript.refused("twice", ConfigError, TaskDataConfig.from_tree, {"datasets": datasets})
    data = TaskDataConfig(datasets=(dataclasses.replace(DATASET, num_test=-1),))
    check = partial(check_counts, may_be_zero=("num_test",))
    transcript.refused("num_test=-1", ConfigError, check, "", data)


def test_an_error_shows_a_long_or_odd_value_on_one_short_line():
    for name, value in (("depth", "a\nb" * 9999), ("a\nb\x1b[2J", 1)):
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_tree(model_for_depth(2).tree() | {name: value})
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 300
