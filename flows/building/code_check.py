"""Compare the code that a job ran with the code that its fingerprint was computed from.

Files may be edited between the two: while a stage waits for a device, or before a late import.
Workers copy every module they load into the job's directory (runtime/code_record.py). Those copies
are compared by digest, not the files, which may have changed once more since.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.building.retry import TransientStageError
from flows.identity.fingerprint import CARRIERS, Code, Identity
from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.runtime.code_record import read_record


class CodeChanged(TransientStageError):
    """The job ran other code than its fingerprint covers; a retry gets a new fingerprint."""


@dataclass
class CodeCheck:
    """A check of a job's record of loaded code, called again as the record grows."""

    identity: Identity
    job: Job
    code: Code
    strict: bool  # a loaded module that the fingerprint does not cover is an error, not a warning
    warn: Callable[[str], None]
    _seen: int = field(default=0, init=False)  # when the record last grew, in nanoseconds
    _warned: set[str] = field(default_factory=set[str], init=False)

    def __call__(self) -> None:
        """Check the record if it grew since the last call.

        Raises CodeChanged if a file differs from what the fingerprint covers, and StageError if the
        fingerprint covers no such file; for a module only if `strict`.
        """
        directory = self.job.code
        if not directory.exists() or (changed := directory.stat().st_mtime_ns) == self._seen:
            return
        self._check(directory)
        # The mtime from before the check: a file added during it is checked by the next call.
        self._seen = changed

    def check_complete(self) -> None:
        """Check the whole record. Raises StageError if the job did not record what it ran."""
        self._seen = 0
        self()
        if self.job.entry not in {name for name, _ in read_record(self.job.code)}:
            raise StageError(f"{self.job.stage} did not record the code that it ran")

    def _check(self, directory: Path) -> None:
        hashed = _hashed(self.identity)
        names: set[str] = set()
        differing: set[str] = set()
        for name, content in read_record(directory):
            if content.strip():  # skips empty __init__.py: modules are recorded by themselves
                names.add(name)
            if name in hashed and self.code.digest_of(name, content) != hashed[name]:
                differing.add(name)
        if differing:
            raise CodeChanged(
                f"{self.job.stage} ran other code than its fingerprint covers: "
                f"{', '.join(sorted(differing))}",
                hint="they were edited while it ran, so what it saved is discarded; if the run "
                "does not retry by itself, run the same command again",
            )
        self._check_covered(leaked_modules(self.identity, names))

    def _check_covered(self, leaked: list[str]) -> None:
        text = f"{self.job.stage} ran code that its fingerprint does not see: "
        if files := [name for name in leaked if "/" in name]:
            raise StageError(
                text + ", ".join(files),
                hint="name each file by a string in a module next to it that the stage imports",
            )
        if new := sorted(set(leaked) - self._warned):
            if self.strict:
                hint = "import these modules by name in what the stage imports"
                raise StageError(text + ", ".join(new), hint=hint)
            self._warned.update(new)
            self.warn(text + ", ".join(new))


def leaked_modules(identity: Identity, loaded: Iterable[str]) -> list[str]:
    """Return the names that a job loaded although its fingerprint does not cover them, sorted."""
    return sorted(set(loaded) - _hashed(identity).keys() - set(CARRIERS))


def _hashed(identity: Identity) -> dict[str, Any]:
    """Return the digests of the code that a fingerprint covers, by name."""
    code = identity.preimage["code"]
    assert isinstance(code, dict)
    return code
