"""A profile as a TOML file means the same settings as --set, and what is written is read again."""

import json
import re
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY
from flows.overrides import name_of
from flows.profile_file import read_profile_file, to_toml
from flows.profiles import PROFILES, open_profile
from flows.run_request import RunRequest
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError

CHANGES = [
    RunRequest(),
    RunRequest(depth=4, run_name="mine"),
    RunRequest(profile="d12", overrides=("task_data.core_bundle=null", "seed=7")),
    RunRequest(profile="d12", overrides=("sft.mixture=sft-without-midtraining",)),
    RunRequest(profile="d12", overrides=("midtrain.mixture=[]",)),
    RunRequest(overrides=("rl.clip=0.2", "optimizer.muon_lr=1e-7"), depth=2),
    RunRequest(overrides=('shards.snapshot=["none==1"]', "rl.kl_weight=1e22")),
    RunRequest(overrides=('chat_eval.prompts=["\\"\\\\ \\n\\u007f \\ud83d\\ude00"]',)),
    RunRequest(overrides=("shards.source=local", "shards.path=/data/a 'b' \"c\"")),
]


def settings_of(request: RunRequest) -> RunConfig:
    return open_profile(
        request.profile, depth=request.depth, overrides=request.overrides, snapshots=False
    ).run


def read(directory: Path, text: str, *, depth: int | None = None) -> RunRequest:
    path = directory / "my.toml"
    path.write_text(text, encoding="utf-8")
    return read_profile_file(path, depth=depth)


@pytest.mark.parametrize("request_", [*CHANGES, *(RunRequest(profile=p) for p in PROFILES)])
def test_what_is_written_is_read_as_the_same_settings_and_the_same_name(tmp_path, request_):
    again = read(tmp_path, to_toml(request_))
    assert again.profile == request_.profile
    assert settings_of(again) == settings_of(request_)
    assert name_of(again) == name_of(request_)
    # A file that changes nothing asks for nothing.
    assert bool(again.overrides) == bool(request_.overrides)


def test_a_commented_null_can_be_used_as_it_stands(tmp_path):
    text = to_toml(RunRequest())
    assert '# core_bundle = "null"\n' in text
    assert read(tmp_path, text.replace('# core_bundle = "null"', 'core_bundle = "null"')) == read(
        tmp_path, text
    )


def test_a_few_lines_are_a_profile(tmp_path):
    text = """
    profile = "tiny"
    name = "mine"
    depth = 4
    data = "../letters"
    seed = 42 # the profile's own
    [pretrain]
    num_steps = 100
    schedule.warmup_steps = 3
    [sft]
    mixture = [{ task = "spelling", epochs = 2 }]
    """
    file = read(tmp_path, text)
    assert (file.profile, file.run_name, file.depth) == ("tiny", "mine", 4)
    assert file.overrides == (
        "pretrain.num_steps=100",
        "pretrain.schedule.warmup_steps=3",
        'sft.mixture=[{"task": "spelling", "num_examples": null, "epochs": 2, "skip": 0}]',
        f"shards.path={tmp_path.parent / 'letters'}",
        "shards.source=local",
    )
    (entry,) = settings_of(file).sft.mixture
    assert (entry.task, entry.num_examples, entry.epochs) == ("spelling", None, 2)


def test_data_replaces_the_text_of_a_whole_file(tmp_path):
    text = to_toml(RunRequest()).replace("# data = ", "data = ")
    shards = settings_of(read(tmp_path, text)).shards
    assert (shards.source, shards.path) == ("local", "/path/to/a/folder/of/text")


def test_paths_are_relative_to_the_file(tmp_path):
    entry = '{ name = "mine", grade = 1, num_train = 1, num_test = 1, path = "a.jsonl" },'
    text = to_toml(RunRequest()).replace("datasets = [", f"datasets = [{entry}")
    text = text.replace('source = "pydocs"', 'source = "local"\npath = "letters"')
    settings = dict(each.split("=", 1) for each in read(tmp_path, text).overrides)
    assert settings["shards.path"] == str(tmp_path / "letters")
    assert json.loads(settings["task_data.datasets"])[0]["path"] == str(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/sub/no.toml")):
        read(tmp_path, 'profile = "tiny"\n[sft]\nmixture = "sub/no.toml"')


@pytest.mark.parametrize(
    ("data", "path", "source"),
    [("hf://owner/name", "owner/name", "hub"), ("null", "null", "local")],  # null is no folder
)
def test_data_may_be_a_dataset_on_the_hub(tmp_path, data, path, source):
    file = read(tmp_path, f'profile = "tiny"\ndata = "{data}"')
    assert file.overrides == (f"shards.path={path}", f"shards.source={source}")


def test_a_mistake_names_the_file(tmp_path, transcript):
    for text in (
        *("", "profile = 5", 'profile = "tinny"', 'profile = "my.toml"'),
        'profile = "tiny"\ndata = ""',
        'profile = "tiny"\ndata = "a"\n[shards]\npath = "/b"',
        'profile = "tiny"\ndepth = true',
        'profile = "tiny"\ndepth = 0',
        'profile = "tiny"\ndepth = 6\n[model]\ndepth = 4',
        'profile = "tiny"\nsede = 7',
        'profile = "tiny"\nseed = 7.5',
        'profile = "tiny"\nseed = 2026-11-23',
        'profile = "tiny"\npretrain = 5',
        'profile = "tiny"\n[pretrain.num_steps]\nn = 1',
        'profile = "tiny"\n[sft]\nmixture = [{ tsak = "identity" }]',
        'profile = "tiny"\n[rl]\ntask = "gsm8k"',
    ):
        transcript.refused(repr(text), ConfigError, read, tmp_path, text)
    with pytest.raises(ConfigError, match=r"my\.toml is not TOML"):
        read(tmp_path, "profile = tiny")


def test_sizes_of_another_depth_are_refused(tmp_path):
    text = to_toml(RunRequest())
    assert read(tmp_path, text, depth=3).overrides == ()
    with pytest.raises(ConfigError, match="depth is 5, but its settings are those of depth 3"):
        read(tmp_path, text, depth=5)


@pytest.mark.parametrize("name", ["nothing.toml", "folder.toml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        read_profile_file(tmp_path / name)
    (tmp_path / "binary.toml").write_bytes(b"\n\xff\xfa")
    with pytest.raises(ConfigError, match=r"binary\.toml:2 is not UTF-8") as error:
        read_profile_file(tmp_path / "binary.toml")
    assert "iconv" in (error.value.hint or "")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_any_editor_is_read(tmp_path, encoding):
    path = tmp_path / "my.toml"
    path.write_bytes('profile = "tiny"\r\n\r\nname = "caf\u00e9"\r\nseed = 7\r\n'.encode(encoding))
    file = read_profile_file(path)
    assert (file.run_name, file.overrides) == ("caf\u00e9", ("seed=7",))


@pytest.mark.parametrize(
    ("group", "item", "key"),
    [
        ("task_data.datasets", 'name = "mine", grade = 1, num_test = 5, path = "/a"', "num_train"),
        (
            "task_data.datasets",
            'name = "spelling", grade = 1, num_train = 9, num_test = 5',
            "path",
        ),
        ("sft.mixture", 'task = "arithmetic", epochs = 1', "num_examples"),
    ],
)
def test_null_in_a_group_of_a_list_is_the_same_as_leaving_it_out(tmp_path, group, item, key):
    def meant(text: str) -> object:
        """Return the overrides of a file, or what is wrong with it as a whole."""
        try:
            return read(tmp_path, f'profile = "tiny"\n{group} = [{{ {text} }}]').overrides
        except ConfigError as error:
            return str(error)

    assert meant(f'{item}, {key} = "null"') == meant(item)


def test_the_example_of_the_guide_is_a_profile(tmp_path):
    guide = (REPOSITORY / "docs/guides/settings.md").read_text(encoding="utf-8")
    file = read(tmp_path, guide.partition("```toml\n")[2].partition("```")[0])
    assert (file.profile, file.run_name, file.depth) == ("tiny", "letters", 4)
    assert [entry.task for entry in settings_of(file).sft.mixture] == [
        "spelling",
        "identity",
    ]


@pytest.mark.parametrize("typed", [r"\n\n", "\n\n", r"\r\n\r\n", "\r\n\r\n", "\n# ", "\t", "; "])
def test_a_separator_is_the_same_on_a_command_line_and_in_a_file(tmp_path, typed):
    source = ("shards.source=local", "shards.path=/letters")
    request = RunRequest(overrides=(*source, f"shards.separator={typed}"))
    meant = typed.replace(r"\r", "").replace("\r", "").replace(r"\n", "\n")
    assert settings_of(request).shards.separator == meant
    spaced = RunRequest(overrides=(*source, f"shards.separator = {typed}"))
    assert settings_of(spaced).shards.separator == meant
    none = RunRequest(overrides=(*source, "shards.separator = null"))
    assert settings_of(none).shards.separator is None
    text = f"[shards]\nsource = 'local'\npath = '/letters'\nseparator = {json.dumps(typed)}\n"
    found = read(tmp_path, f"profile = 'tiny'\n{text}")
    again = RunRequest(overrides=found.overrides)
    assert settings_of(again).shards.separator == meant
    assert name_of(again) == name_of(request)
