"""What is recorded of the machine that computed a result."""

import platform

import pytest

from nanochat_core.runtime.versions import processor_name, versions_in_use


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9V74\nflags\t: avx2\n", "AMD EPYC 9V74"),
        ("model name : A: with a colon\nmodel name : B\n", "A: with a colon"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", None),  # ARM has no name there
        ("model name\t:\n", None),
        ("", None),
        (None, None),  # no such file: not Linux
    ],
)
def test_a_processor_is_named_by_its_product_or_its_architecture(tmp_path, text, name):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert processor_name(path) == (name or platform.machine())


def test_every_record_names_python_and_the_processor():
    found = versions_in_use()
    assert found["python"] == platform.python_version()
    assert found["processor"] == processor_name()
