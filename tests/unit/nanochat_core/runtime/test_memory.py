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


FREED = {"memory_stat": "anon 7\ninactive_file 900"}  # files that were read are not in the way
V1 = {"memory_limit_in_bytes": 7000, "memory_usage_in_bytes": 6500}
LEFT = {  # what is left by the files of each group
    "the machine's name for it": ({"work": {"memory_max": 5000, "memory_current": 1500}}, 3500),
    "no name": ({"": {"memory_max": 5000, "memory_current": 1500}}, 3500),
    "the outer group's limit": (
        {
            "": {"memory_max": 5000, "memory_current": 4000},
            "work": {"memory_max": "max", "memory_current": 10},
        },
        1000,
    ),
    "files": ({"work": {"memory_max": 5000, "memory_current": 4900, **FREED}}, 1000),
    "version 1": (
        {
            "memory": {"memory_limit_in_bytes": NO_LIMIT, "memory_usage_in_bytes": 1},
            "memory/work": {**V1, "memory_stat": "inactive_file 1\ntotal_inactive_file 300"},
        },
        800,
    ),
    "above the limit": ({"work": {"memory_max": 5000, "memory_current": 5100}}, 0),
}


@pytest.mark.parametrize(("groups", "left"), LEFT.values(), ids=LEFT)
def test_the_smallest_limit_of_all_groups_counts(root, groups, left):
    for name, files in groups.items():
        write_group(root / name, **files)
    assert memory.memory_left() == left
