"""Checkpoints: the resumable state of an unfinished job. Every rank writes its part of it.

    step-0000200/tensors-00000.safetensors   rank 0's part of the training state, and so on
    step-0000200/tensors-00000.json          its size and sha256, until they are in COMMIT.json
    step-0000200/COMMIT.json                 written last, by rank 0, when every file is complete
    damaged-step-0000100/                    unreadable, or saved while losses exploded: for people

COMMIT.json names every file with its size and sha256, the step and the loop's own state. A
directory without it is no checkpoint yet. One whose files differ from it is renamed to damaged-...,
so that neither `prune` nor the upload of checkpoints counts it, and the one before it is used. One
of another format is not damaged: it is refused, and stays for the version that wrote it.

A tensor that several ranks share is saved in pieces: the key `weight/x#128` holds its rows from 128
on, and a job with any number of ranks reads them as one tensor. Never a pickle, which may run code.
"""

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat_core.errors import ModelError
from nanochat_core.job import CHECKPOINT_FORMAT as FORMAT
from nanochat_core.job import check_checkpoints, sync_directory, write_json

_COMMIT = "COMMIT.json"
_DAMAGED = "damaged-"
_CHUNK = 2**18  # bytes
_DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}
_SECONDS_BETWEEN_LOOKS = 0.02  # of rank 0, for the other ranks' files


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """The fields of COMMIT.json next to the list of files."""

    step: int
    total: int
    world_size: int  # of the job that wrote it; any other may read it
    seconds: float  # that the job had run for by then, all its executions together
    state: dict[str, Any]  # the loop's own


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointFacts):
    """A committed checkpoint, open for reading."""

    directory: Path
    # key -> its pieces: first row, file, key in the file; by first row
    pieces: dict[str, list[tuple[int, str, str]]] = field(repr=False)

    def read(self, key: str) -> Tensor:
        """Return the whole tensor of `key`, on the CPU. Raises ModelError if it was not saved."""
        if key not in self.pieces:
            raise ModelError(f"checkpoint {self.directory.name} has no tensor {key}")
        parts: list[Tensor] = []
        for first, name, inner in self.pieces[key]:
            assert first == sum(len(part) for part in parts), f"{key} lacks rows before {first}"
            with safe_open(self.directory / name, framework="pt", device="cpu") as file:
                parts.append(file.get_tensor(inner))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def directory_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return root / f"step-{step:07d}"


def write_pieces(directory: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Write what one rank owns, and read it back to prove that the disk holds the same values.

    `tensors` are contiguous, on the CPU, and finite in every number. Raises OSError on a full disk,
    ModelError if the disk returns other values.
    """
    path = directory / f"tensors-{rank:05d}.safetensors"
    sha256 = _write_safetensors(path, tensors)
    # The file was dropped from the page cache, so this reads the disk: a bad one is found now, not
    # when the job resumes.
    with safe_open(path, framework="pt", device="cpu") as file:
        for key, tensor in tensors.items():
            if not torch.equal(file.get_tensor(key), tensor):
                raise ModelError(f"{path} gives back other values of {key} than were written")
    # The record comes last: rank 0 takes it as the sign that this rank's file is complete.
    write_json(_record(directory, rank), {"size": path.stat().st_size, "sha256": sha256})


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file to the disk, drop it from the page cache, and return its sha256.

    The format: the header's length (u64), the header as JSON, the tensors' bytes. It is written
    here because the library's writer and a hash of the file after it cost a core 2.5 times as much
    (428 MB: 0.98 s against 0.37 s of CPU), and training needs that core.
    """
    # The widest first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for data in (struct.pack("<Q", len(text)) + text, *(_bytes_of(tensors[n]) for n in names)):
            for first in range(0, len(data), _CHUNK):  # small enough to hash from the CPU's cache
                chunk = data[first : first + _CHUNK]
                file.write(chunk)
                hasher.update(chunk)
        file.flush()
        # On the disk before COMMIT.json names it: after a power cut no commit names a lost file.
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # what is read back comes from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hasher.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def commit(
    directory: Path, facts: CheckpointFacts, given_up: Callable[[], bool] = lambda: False
) -> bool:
    """Make the directory a checkpoint as soon as every rank's file is complete. For rank 0.

    Returns False, without a commit, if `given_up` returns True before all files are complete.
    """
    records = [_record(directory, rank) for rank in range(facts.world_size)]
    # Ranks meet in the file system: this runs in a thread, where a collective would get in between
    # those of the training loop.
    for record in records:
        while not record.exists():
            if given_up():
                return False
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    files = {
        f"tensors-{rank:05d}.safetensors": json.loads(record.read_text(encoding="utf-8"))
        for rank, record in enumerate(records)
    }
    write_json(directory / _COMMIT, {"format": FORMAT, "files": files, **vars(facts)})
    sync_directory(directory.parent)  # the entry of the directory itself
    for record in records:
        record.unlink()
    return True


def clear(root: Path, step: int) -> Path:
    """Make an empty directory for the checkpoint of `step`, removing what a dead attempt left."""
    directory = directory_of(root, step)
    # The commit first: killed in between, this leaves files that are no checkpoint.
    (directory / _COMMIT).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def prune(root: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. Call it after a commit.

    What a killed save left of an earlier step is removed too.
    """
    # Steps have seven digits, so the order of names is that of steps.
    committed = [path.parent for path in sorted(root.glob(f"step-*/{_COMMIT}"))]
    for old in root.glob("step-*"):
        # What is newer than the last commit is a save that is being written.
        if old not in committed[-keep:] and old < committed[-1]:
            (old / _COMMIT).unlink(missing_ok=True)
            # Another machine's part of a save that was given up may arrive in it just now: what
            # cannot be removed is removed next time.
            shutil.rmtree(old, ignore_errors=True)


def newest_step(root: Path, *, at_most: int | None = None) -> int | None:
    """Return the step of the newest committed checkpoint, None if none is. Verifies nothing."""
    steps = (_step_of(path.parent) for path in root.glob(f"step-*/{_COMMIT}"))
    return max((step for step in steps if at_most is None or step <= at_most), default=None)


def set_aside_after(root: Path, step: int) -> None:
    """Rename the checkpoints after `step` to damaged-...: they were saved as the loss exploded."""
    for path in list(root.glob(f"step-*/{_COMMIT}")):
        if _step_of(path.parent) > step:
            _set_aside(path.parent)


def find_checkpoint(
    root: Path,
    *,
    warn: Callable[[str], None],
    rank: int = 0,
    world_size: int = 1,
    any_rank: Callable[[bool], bool] = bool,
) -> Checkpoint | None:
    """Open the newest checkpoint that verifies; None without one. A damaged one is set aside.

    `warn` gets a line for each of those. Collective: each rank verifies its share of the files, and
    `any_rank` returns whether one of them found damage, so that all ranks return the same
    checkpoint. Raises StageError if any checkpoint is of another format.
    """
    check_checkpoints(root)
    for directory in sorted(root.glob("step-*"), reverse=True):
        found, problem = None, None
        # Without a commit the job was killed while it saved: expected, so without a warning.
        was_committed = (directory / _COMMIT).exists()
        try:
            found = _open(directory, rank, world_size)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, ModelError) as error:
            problem = error
        if not any_rank(problem is not None):
            return found
        if not was_committed:
            continue
        why = problem or "another rank could not verify its files"
        warn(
            f"checkpoint {directory.name} is damaged and is passed over: {why}; it is renamed to "
            f"{_DAMAGED}{directory.name}"
        )
        if rank == 0:  # `any_rank` has returned, so no rank reads it any more
            _set_aside(directory)
    return None


def _set_aside(directory: Path) -> None:
    """Rename a checkpoint so that nothing counts it."""
    aside = directory.with_name(f"{_DAMAGED}{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    sync_directory(directory.parent)


def _open(directory: Path, rank: int, world_size: int) -> Checkpoint:
    tree = json.loads((directory / _COMMIT).read_text(encoding="utf-8"))
    pieces: dict[str, list[tuple[int, str, str]]] = {}
    for number, (name, expected) in enumerate(tree["files"].items()):
        path = directory / name
        if path.stat().st_size != expected["size"]:
            raise ModelError(f"{name} has {path.stat().st_size} bytes, not {expected['size']}")
        # Each rank hashes a share of the files: all of them on every rank would take too long.
        if number % world_size == rank and (actual := _sha256(path)) != expected["sha256"]:
            raise ModelError(
                f"{name} has sha256 {actual[:12]}, committed {expected['sha256'][:12]}"
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            for inner in file.keys():  # noqa: SIM118 - it is no dict
                key, _, first = inner.partition("#")
                pieces.setdefault(key, []).append((int(first or 0), name, inner))
    facts = {fact.name: tree[fact.name] for fact in fields(CheckpointFacts)}
    pieces = {key: sorted(found) for key, found in pieces.items()}
    return Checkpoint(**facts, directory=directory, pieces=pieces)


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _record(directory: Path, rank: int) -> Path:
    """Return the path of the record that says that a rank's file is complete."""
    return directory / f"tensors-{rank:05d}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
