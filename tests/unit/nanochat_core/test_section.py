import dataclasses
from dataclasses import dataclass, field

import pytest

from nanochat_core.config import DatasetConfig, ModelConfig, NumericsConfig, TaskDataConfig
from nanochat_core.eras import numerics
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import model_for_depth
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


def dataset(**changes):
    tree = {"name": "letters", "grade": 1, "num_train": None, "num_test": 0, **changes}
    return DatasetConfig.from_tree(tree)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "Letters", ".a", "a b", "-a"])
def test_a_dataset_has_a_name_that_can_be_a_folders(name):
    with pytest.raises(ConfigError, match=f"a dataset is called '{name}'"):
        dataset(name=name)


def test_counts_of_a_dataset_are_none_or_not_below_zero():
    assert dataset().num_train is None
    data = TaskDataConfig(datasets=(dataset(num_test=-1),))
    with pytest.raises(ConfigError, match=r"datasets\[0\].num_test is -1, expected at least 0"):
        check_counts("", data, may_be_zero=("num_test",))


def test_a_dataset_is_named_once():
    with pytest.raises(ConfigError, match=r"datasets names 'letters' 2 times"):
        TaskDataConfig(datasets=(dataset(), dataset()), core_bundle=None, core_bundle_sha256=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("depth", "width", "num_heads") for value in (0, -64, 2**31)),
        *(("num_kv_heads", value) for value in (0, -1)),
        *((name, 2**20 + 1) for name in ("sequence_len", "vocab_size")),
        ("windows", [2048, -1]),
        ("windows", [2048, 2**31]),
    ],
)
def test_a_shape_that_no_model_has_is_refused_in_one_line(name, value):
    tree = model_for_depth(2).tree() | {name: value}
    with pytest.raises(ConfigError, match=rf"^model\.{name} is -?\d+, expected \d+ to \d+$"):
        ModelConfig.from_tree(tree)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("softcap", 0.0), ("rotary_base", 0.0), ("norm_eps", -1.0), ("smear_channels", 0)),
        ("softcap", 30.5),
        *(("gate_channels", -12), ("qk_scale", 1e300), ("init_embedding_std", -0.8)),
    ],
)
def test_constants_that_no_model_has_are_refused(name, value):
    tree = numerics("fp32").tree() | {name: value}
    with pytest.raises(ConfigError, match=rf"^numerics\.{name} is .*, expected .* to "):
        NumericsConfig.from_tree(tree)


def test_an_error_shows_a_long_or_odd_value_on_one_short_line():
    for name, value in (("depth", "a\nb" * 9999), ("a\nb\x1b[2J", 1)):
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_tree(model_for_depth(2).tree() | {name: value})
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 300
