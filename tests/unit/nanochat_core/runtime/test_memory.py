"""What may still be taken, in a container and outside of one."""

import psutil
import pytest

from nanochat_core.runtime.hardware import memory

NO_LIMIT = 9223372036854771712  # version 1's word for it


def write_group(folder, **files):
    """One group's files, by their names with _ for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Groups of a stand-in machine; this process is in /work of both versions."""
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text("4:cpu,memory:/work\n2:freezer:/\n0::/work\n")
    return tmp_path / "groups"


def test_without_groups_it_is_the_machines(root):
    machine = psutil.virtual_memory().available
    assert memory.memory_left() == pytest.approx(machine, rel=0.2)
    memory.OWN.unlink()
    assert memory.memory_left() == pytest.approx(machine, rel=0.2)


@pytest.mark.parametrize("group", ["", "work"])
def test_a_containers_limit_counts_whether_it_knows_its_name_or_not(root, group):
    write_group(root / group, memory_max=5000, memory_current=1500)
    assert memory.memory_left() == 3500


def test_the_outer_groups_limit_counts_too(root):
    write_group(root, memory_max=5000, memory_current=4000)
    write_group(root / "work", memory_max="max", memory_current=10)
    assert memory.memory_left() == 1000


def test_files_that_were_read_are_not_in_the_way(root):
    write_group(
        root / "work", memory_max=5000, memory_current=4900, memory_stat="anon 7\ninactive_file 900"
    )
    assert memory.memory_left() == 1000


def test_version_1_counts_as_well(root):
    folder = root / "memory" / "work"
    write_group(folder.parent, memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=1)
    write_group(
        folder,
        memory_limit_in_bytes=7000,
        memory_usage_in_bytes=6500,
        memory_stat="inactive_file 1\ntotal_inactive_file 300",
    )
    assert memory.memory_left() == 800


def test_above_the_limit_there_is_nothing(root):
    write_group(root / "work", memory_max=5000, memory_current=5100)
    assert memory.memory_left() == 0
