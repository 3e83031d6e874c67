import pytest

from nanochat_core.errors import ConfigError
from nanochat_core.scaling import open_mixture
from tasks.base import TaskError
from tasks.mixtures.mixture_files import Share, mixture_names, read_mixture
from tasks.names import TASKS

MIDTRAIN = {
    "smoltalk": (None, 1),
    "mmlu": (None, 1),
    "gsm8k": (None, 1),
    "identity": (None, 2),
    "simple_spelling": (200_000, 1),
    "spelling_bee": (80_000, 1),
}


def test_every_mixture_of_ours_names_tasks_that_there_are():
    named = {share.task for name in mixture_names() for share in read_mixture(name)}
    assert named <= TASKS.keys()


def test_midtraining_is_that_of_january():
    shares = {share.task: (share.rows, share.epochs) for share in read_mixture("midtrain")}
    assert shares == MIDTRAIN


def test_a_file_of_ones_own_is_given_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[[dataset]]\ntask = "gsm8k"\nepochs = 4\n')
    assert read_mixture(str(path)) == (Share(task="gsm8k", rows=None, epochs=4),)
    path.write_bytes('[[dataset]]\r\ntask = "gsm8k"\r\n'.encode("utf-16"))
    assert read_mixture(str(path)) == (Share(task="gsm8k", rows=None, epochs=1),)


NO_MIXTURE = [
    *("", "x = 1", "[[dataset]", "[[dataset]]", '[[dataset]]\ntask = "a"\n[[dataset]]\ntask = 3'),
    *(f'[[dataset]]\ntask = "a"\n{more}' for more in ("epoch = 2", "rows = 0", "epochs = 1.5")),
]


def test_what_is_no_mixture_is_named(tmp_path, transcript):
    path = tmp_path / "mine.toml"
    for text in NO_MIXTURE:
        path.write_text(text)
        transcript.refused(repr(text), TaskError, read_mixture, str(path))
    transcript.refused("midtrian", TaskError, read_mixture, "midtrian")


def test_a_mixture_that_is_not_text_is_named_once_with_its_hint(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError) as error:
        open_mixture(str(path))
    assert str(error.value).count(str(path)) == 1
    assert "iconv" in error.value.hint
