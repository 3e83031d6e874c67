"""The files through which a launcher and a job's workers communicate: job.json and result.json.

A job is one execution of one stage. Its directory has all that `python -m nanochat_core.worker
job.json` needs to run it again:

    job.json         what to do (this module)
    output/          what the stage makes; becomes the artifact's files
    events.jsonl     progress and metrics, one JSON object per line; becomes the artifact's log
    checkpoints/     resumable state of an unfinished job
    result.json      `finished` or `interrupted`; absent when the job failed
    error.json       the exception of a failed job
    code/            every module and data file of our packages that the job loaded
"""

import hashlib
import json
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from nanochat_core.errors import StageError

FORMAT = 1  # of job.json, which the code of an older commit also reads (flows/plan/prove.py)
RESULT_FORMAT = 2
_BLOCK = 8 << 20  # bytes read between two beats: less than a second, also from a slow disk
CHECKPOINT_FORMAT = 2  # of what lies in checkpoints/, see nanochat_core/train/loop/checkpoint.py

Status: TypeAlias = Literal["finished", "interrupted"]
Determinism: TypeAlias = Literal["default", "strict"]
# "auto": as flows/building/job.py chooses for the stage; true: the whole pass in one graph.
Compile: TypeAlias = Literal["auto", True, False, "blocks"]
# The names in nanochat_core/model/attention_backends.py, for callers that do not load torch.
Attention: TypeAlias = Literal["auto", "fa3", "cudnn", "fa4", "flex", "fa2", "varlen", "sdpa"]
# The module or distribution of a backend, and how to install it. The folder flash_attn says too
# little: FlashAttention 2 and 4 share it, and both have flash_attn.cute.
ATTENTION_PACKAGES = {
    "fa2": ("flash-attn", "pip install 'nanochat-flows[flash-attn]'"),
    "fa3": ("flash_attn_interface", "build FlashAttention 3 from its sources"),
    "fa4": ("flash-attn-4", "pip install 'nanochat-flows[fa4]'"),
    "cudnn": ("cudnn", "pip install 'nanochat-flows[gpu]'"),
}

TRACKERS = ("trackio", "wandb")  # packages that metrics can be sent to


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The part of the placement that a job sees. It never changes a result's identity."""

    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads of one process
    device_batch_size: int  # rows per device per micro-step
    save_every_seconds: float  # from one checkpoint to the next
    eval_every_steps: int  # between validations in training; 0: only at the start and the end
    dollars_per_hour: float = 0.0  # price of the whole placement, for estimates and reports
    save_every_steps: int = 0  # also a checkpoint after this many steps; 0: by time alone
    keep_checkpoints: int = 2  # the newest ones to keep on this machine
    hang_seconds: float = 600.0  # end the job after this long without a heartbeat of any rank
    grace_seconds: float = 25.0  # from a stop signal until the ranks are killed
    retry_smaller_batch: bool = True  # out of memory: start again with half the device batch
    attention: Attention = "auto"  # a backend; "auto": the first that this device can run
    compile: Compile = False  # by torch.compile: true: whole passes; "blocks": each kind of block
    autotune: bool = False  # `compile` times each product, also fused with what follows; untried
    qk_kernel: bool = False  # on GPUs: rotary positions and QK norm in a kernel of ours; untried
    weight_kernel: bool = False  # on GPUs, bf16: gradients of matrices by a kernel of ours; untried
    determinism: Determinism = "default"  # "strict": only deterministic kernels
    sinks: tuple[str, ...] = ()  # trackers that also get the metrics: "wandb", "trackio"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One execution of one stage."""

    directory: Path
    stage: str
    entry: str  # module with `run(job) -> dict`
    fingerprint: str
    config: dict[str, Any]  # the sections the stage declares, as plain JSON trees
    inputs: dict[str, Path]  # stage name -> directory of that artifact's files
    resources: Resources
    plugins: tuple[str, ...] = ()  # packages outside this repository whose code it also runs

    @property
    def output(self) -> Path:
        """The directory of the stage's output files."""
        return self.directory / "output"

    @property
    def checkpoints(self) -> Path:
        """The directory of resumable state."""
        return self.directory / "checkpoints"

    @property
    def events(self) -> Path:
        """The file of the job's progress and metrics."""
        return self.directory / "events.jsonl"

    @property
    def code(self) -> Path:
        """The directory in which workers record the code that they run."""
        return self.directory / "code"

    @property
    def model_input(self) -> Path:
        """The model this stage trains or evaluates: by the stage table's rule, the first input."""
        return next(iter(self.inputs.values()))

    def write(self) -> Path:
        """Write job.json atomically; return its path."""
        path = self.directory / "job.json"
        write_json(path, self._tree())
        return path

    def is_written(self) -> bool:
        """Return whether job.json in the directory describes exactly this job."""
        try:
            written = json.loads((self.directory / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        # Through JSON, which turns tuples into lists.
        return written == json.loads(json.dumps(self._tree()))

    def _tree(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "stage": self.stage,
            "entry": self.entry,
            "fingerprint": self.fingerprint,
            "config": self.config,
            "inputs": {name: str(path) for name, path in self.inputs.items()},
            "resources": vars(self.resources),
            "plugins": list(self.plugins),
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read job.json. Raises StageError if it is invalid or of another format."""
        tree = _read_tree(path, FORMAT)
        resources: dict[str, Any] = {**tree["resources"]}
        resources["sinks"] = tuple(resources["sinks"])
        return cls(
            directory=path.resolve().parent,
            stage=tree["stage"],
            entry=tree["entry"],
            fingerprint=tree["fingerprint"],
            config=tree["config"],
            inputs={name: Path(p) for name, p in tree["inputs"].items()},
            resources=Resources(**resources),
            plugins=tuple(tree.get("plugins", ())),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a job that finished or was interrupted."""

    status: Status
    metrics: dict[str, Any]  # reported by the stage: plain numbers and short strings
    output: dict[str, str] = field(default_factory=dict[str, str])  # sha256 by path in output/
    versions: dict[str, str] = field(default_factory=dict[str, str])  # of the software used

    def write(self, directory: Path) -> None:
        """Write result.json atomically."""
        write_json(
            directory / "result.json",
            {
                "format": RESULT_FORMAT,
                "status": self.status,
                "metrics": self.metrics,
                "output": self.output,
                "versions": self.versions,
            },
        )

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """Return the job's result, or None if it has none (it failed or was killed).

        Format 1, which the code of an older commit writes, has no files and no versions.
        Raises StageError if it is of another format.
        """
        path = directory / "result.json"
        if not path.exists():
            return None
        tree = _read_tree(path, 1, RESULT_FORMAT)
        return cls(
            status=tree["status"],
            metrics=tree["metrics"],
            versions=tree.get("versions", {}),
            output=tree.get("output", {}),
        )


def digests_of(directory: Path, *, beat: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Return the sha256 of every plain file below `directory`, by its path. Raises OSError.

    `beat` is called for every block that is read.
    """
    found: dict[str, str] = {}
    # Read once for the hash, so a beat per block: a large output takes minutes.
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                beat()
        found[path.relative_to(directory).as_posix()] = digest.hexdigest()
    return found


def check_checkpoints(directory: Path) -> None:
    """Raise StageError if `directory` has a committed checkpoint of another format."""
    # Another version of the code can resume from it, so this one must not rename it, prune it or
    # save next to it.
    for commit in sorted(directory.glob("step-*/COMMIT.json")):
        try:
            number = json.loads(commit.read_text(encoding="utf-8"))["format"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, so it has no format
        check_format(number, where=commit.parent)


def check_format(number: object, *, where: object) -> None:
    """Raise StageError unless `number` is the format of checkpoints that this version reads."""
    if number != CHECKPOINT_FORMAT:
        raise StageError(
            f"checkpoint {where} is of format {number}, this version reads {CHECKPOINT_FORMAT}",
            hint="resume with the version of the code that wrote it, or start again: "
            "`nanochat run PROFILE --force STAGE`",
        )


def write_json(path: Path, tree: Any) -> None:
    """Write `tree` as JSON so that a reader sees the whole file or none, even after a power cut."""
    # fsync before the rename: otherwise the name could survive a power cut without the content.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Artifacts contain such files, and this module is in no fingerprint: a test pins the bytes.
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(tree, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a finished file so that `path` is complete or absent, even after a power cut."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_tree(path: Path, *formats: int) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(f"{path} cannot be read: {error}") from error
    # Any JSON value may be in a file of another program.
    fields = typing.cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
    if fields.get("format") not in formats:
        raise StageError(
            f"{path} is not of format {formats[-1]}",
            hint="it was written by another version of nanochat-flows",
        )
    return fields
