"""Wrong words on the command line: one line, one hint, exit code 2."""

from pathlib import Path

import pytest

from tests.support.flows.terminal import Terminal


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("pln tiny", "unknown command 'pln'", "did you mean 'plan'?"),
        ("xyzzy", "unknown command 'xyzzy'", "`nanochat --help` lists the commands"),
        ("plan tiny --dept 3", "unknown option --dept", "did you mean --depth?"),
        ("plan tiny --zzz", "unknown option --zzz", "see `nanochat plan --help`"),
        ("start", "unknown command 'start'", "did you mean run or up?"),
        ("train tiny", "unknown command 'train'", "did you mean run?"),
        ("list", "unknown command 'list'", "did you mean ls?"),
        ("rm tiny", "unknown command 'rm'", "did you mean gc?"),
        ("tiny run", "unknown command 'tiny'", "it is a profile: nanochat run tiny"),
        ("d12 plan --depth 2", "unknown command 'd12'", "nanochat plan d12 --depth 2"),
        ("sft", "unknown command 'sft'", "it is a stage: nanochat ls --stage sft"),
        ("sft@tiny", "unknown command 'sft@tiny'", "it is an artifact: nanochat ls sft@tiny"),
        ("seed=7", "unknown command 'seed=7'", "it is a setting: nanochat run tiny --set seed=7"),
        ("submit tiny", "unknown command 'submit'", "did you mean run --submit?"),
        ("export tiny x", "unknown command 'export'", "did you mean fetch --as hf?"),
        ("deploy", "unknown command 'deploy'", "did you mean up --register?"),
        ("history", "unknown command 'history'", "did you mean status or compare?"),
        ("verson", "unknown command 'verson'", "did you mean 'version'?"),
        (
            "plan tiny --pretrain.num_steps 5",
            "unknown option --pretrain.num_steps",
            "did you mean --set pretrain.num_steps=5?",
        ),
        (
            "plan tiny --sft.num_epoch 5",
            "unknown option --sft.num_epoch",
            "did you mean --set sft.num_epochs=5, --set midtrain.num_epochs=5",
        ),
        (
            "run tiny --num_steps 5",
            "unknown option --num_steps",
            "did you mean --set pretrain.num_steps=5, --set rl.num_steps=5",
        ),
        ("run tiny --seed=7", "unknown option --seed", "did you mean --set seed=7?"),
        ("plan tiny --layers", "unknown option --layers", "see `nanochat plan --help`"),
        ("plan tiny --threads 2", "unknown option --threads", "did you mean --place threads=2?"),
        ("chat tiny --batch-size 2", "unknown option --batch-size", "see `nanochat chat --help`"),
        (
            "run tiny seed=7",
            "unexpected argument 'seed=7'",
            "a setting is given like --set seed=7",
        ),
        ("logs tiny", "unknown command 'logs'", "status RUN --follow or status RUN STAGE?"),
        ("status tiny sft follow", "unexpected argument 'follow'", "did you mean --follow?"),
        ("run tiny --resume", "unknown option --resume", "leave it out: the same command resumes"),
        ("ls --limit 0", "--limit is 0", "at least 1"),
        ("compare one two --answers -1", "--answers is -1", "at least 0"),
        ("bench --depth 1 --tokens 1", "--tokens is 1", "at least 2"),
        ("bench --batch-sizes 4 0", "--batch-sizes is 4, 0", "at least 1"),
        ("diff tiny main", "unknown command 'diff'", "did you mean compare?"),
        ("node {}", "unknown command 'node'", "did you mean stage?"),
        ("explain tiny sft", "unknown command 'explain'", "did you mean plan PROFILE STAGE?"),
        ("plan", "plan needs PROFILE", "see `nanochat plan --help`"),
        ("plan tiny --depth", "--depth needs a value", "see `nanochat plan --help`"),
        ("run tiny small", "unexpected argument 'small'", "see `nanochat run --help`"),
        (
            "plan tiny --depth three",
            'invalid value for --depth: unable to convert "three" into int',
            "see `nanochat plan --help`",
        ),
    ],
)
def test_wrong_words_on_the_command_line(
    words: str, error: str, hint: str, tmp_path: Path, terminal: Terminal
) -> None:
    found = terminal.fails(*words.split(), code=2)
    assert found[0] == error
    assert hint in found[1]
    assert not list((tmp_path / "home").iterdir())
