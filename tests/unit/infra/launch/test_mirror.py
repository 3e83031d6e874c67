"""The newest checkpoint goes out, whole, while the job goes on saving and dropping."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.launch.mirror import mirror
from nanochat_core.errors import NanochatError, StageError, StoreError
from nanochat_core.job import write_json
from tests.support.flows.waiting import wait_until


def save(root: Path, step: int, text: str = "x") -> Path:
    directory = root / f"step-{step:07d}"
    directory.mkdir(parents=True)
    (directory / "tensors").write_text(f"{text}{step}")
    write_json(directory / "COMMIT.json", {"step": step})  # at once, as a job does
    return directory


class Receiver:
    """Remembers what it was sent."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.errors: list[NanochatError] = []
        self.fail: list[Exception] = []

    def __call__(self, directory: Path, check: object) -> None:
        if self.fail:
            raise self.fail.pop()
        step = json.loads((directory / "COMMIT.json").read_text())["step"]
        assert (directory / "tensors").read_text() == f"x{step}"
        self.steps.append(step)


def test_each_new_checkpoint_is_sent_once(tmp_path: Path):
    receiver = Receiver()
    with mirror(tmp_path, receiver, on_error=receiver.errors.append, every=0.005):
        for step in (1, 2, 3):
            save(tmp_path, step)
            wait_until(lambda step=step: receiver.steps[-1:] == [step])
        (tmp_path / "elsewhere").mkdir()
        without = save(tmp_path / "elsewhere", 4)
        (without / "COMMIT.json").unlink()
        without.rename(tmp_path / without.name)  # no checkpoint
        time.sleep(0.05)
    assert receiver.steps == [1, 2, 3]
    assert not receiver.errors


def test_after_damage_the_next_is_sent_though_its_step_is_lower(tmp_path: Path):
    """The job sets its damaged checkpoints aside, and goes on from the one before."""
    for step in (5, 8, 9):
        save(tmp_path, step)
    receiver = Receiver()
    with mirror(tmp_path, receiver, on_error=receiver.errors.append, every=0.005):
        for step in (8, 9):
            name = f"step-000000{step}"
            (tmp_path / name).rename(tmp_path / f"damaged-{name}")
        time.sleep(0.05)
        assert receiver.steps == []  # that of step 5 was there before
        save(tmp_path, 6)
        wait_until(lambda: receiver.steps == [6])
    assert not receiver.errors


def test_the_last_one_is_sent_before_the_block_is_left_also_by_an_error(tmp_path: Path):
    receiver = Receiver()

    def train() -> None:
        with mirror(tmp_path, receiver, on_error=receiver.errors.append, every=60.0):
            save(tmp_path, 1)
            save(tmp_path, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert receiver.steps == [2]


@pytest.mark.parametrize(
    ("raises", "error", "said"),
    [
        ("send", StoreError("not now"), "not now"),
        ("send", OSError(28, "No space left on device"), "no space left on device"),
        ("send", FileNotFoundError(2, "No such file or directory"), "no such file or directory"),
        ("skip", StageError("result.json is of another format"), "another format"),
        ("skip", ValueError("no JSON"), "no json')"),
        ("skip", KeyError("status"), "keyerror('status')"),
        ("skip", TypeError("a list, not an object"), "a list, not an object')"),
    ],
)
def test_an_error_is_reported_and_what_was_saved_is_sent_at_the_next_look(
    tmp_path: Path, raises: str, error: Exception, said: str
):
    receiver = Receiver()
    errors: dict[str, list[Exception]] = {"send": receiver.fail, "skip": []}
    errors[raises] += [error, error]

    def skip(directory: Path) -> bool:
        if errors["skip"]:
            raise errors["skip"].pop()
        return False

    with mirror(tmp_path, receiver, on_error=receiver.errors.append, skip=skip, every=0.005):
        save(tmp_path, 1)
        wait_until(lambda: receiver.steps == [1])
    assert [str(error).endswith(said) for error in receiver.errors] == [True, True]


def test_a_checkpoint_stays_whole_while_it_is_sent_though_the_job_drops_it(tmp_path: Path):
    directory = save(tmp_path, 1)
    shutil.rmtree(directory)
    reached, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def send(copy: Path, check: object) -> None:
        reached.set()
        assert go_on.wait(120)
        seen.append((copy / "tensors").read_text())

    with mirror(tmp_path, send, on_error=lambda error: None, every=0.005):
        directory = save(tmp_path, 1)
        assert reached.wait(120)
        shutil.rmtree(directory)
        go_on.set()
    assert seen == ["x1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("newer", [True, False])
def test_at_the_end_an_older_upload_is_given_up_for_the_newest(tmp_path: Path, newer: bool):
    reached = threading.Event()
    sent: list[str] = []

    def send(copy: Path, check: Callable[[], None]) -> None:
        reached.set()
        blocks = 20_000 if newer and copy.name.endswith("1") else 20
        for _ in range(blocks):
            check()
            time.sleep(0.005)
        sent.append(copy.name[-1])

    errors: list[NanochatError] = []
    with mirror(tmp_path, send, on_error=errors.append, every=0.005):
        save(tmp_path, 1)
        assert reached.wait(120)
        if newer:
            save(tmp_path, 2)
    assert (sent, errors) == (["2" if newer else "1"], [])


def test_while_the_job_runs_an_older_upload_goes_on(tmp_path: Path):
    reached, go_on = threading.Event(), threading.Event()
    sent: list[str] = []

    def send(copy: Path, check: Callable[[], None]) -> None:
        reached.set()
        assert go_on.wait(120)
        check()
        sent.append(copy.name[-1])

    with mirror(tmp_path, send, on_error=lambda error: None, every=0.005):
        save(tmp_path, 1)
        assert reached.wait(120)
        save(tmp_path, 2)
        go_on.set()
        wait_until(lambda: sent == ["1", "2"])


def test_a_stop_gives_up_an_older_upload_as_soon_as_the_next_save_begins(tmp_path: Path):
    stopping, begun = threading.Event(), threading.Event()
    reached: list[str] = []
    given_up: list[str] = []

    def send(copy: Path, check: Callable[[], None]) -> None:
        reached.append(copy.name[-1])
        try:
            while not begun.is_set() or (reached == ["1"] and stopping.is_set()):
                check()
                time.sleep(0.005)
        except StageError:
            given_up.append(copy.name[-1])
            raise

    errors: list[NanochatError] = []
    with mirror(tmp_path, send, on_error=errors.append, is_stopping=stopping.is_set, every=0.005):
        directory = save(tmp_path, 1)
        wait_until(lambda: reached == ["1"])
        stopping.set()
        begun.set()
        (tmp_path / "step-0000002").mkdir()  # is being saved
        wait_until(lambda: given_up == ["1"])
        wait_until(lambda: len(reached) > 1)  # again, as nothing newer is committed
        assert directory.exists()
    assert (reached, errors) == (["1", "1"], [])


def test_without_hard_links_a_copy_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr("os.link", refuse)
    receiver = Receiver()
    with mirror(tmp_path, receiver, on_error=receiver.errors.append, every=60.0):
        save(tmp_path, 1)
    assert receiver.steps == [1]
