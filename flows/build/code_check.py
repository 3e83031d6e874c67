"""Compares the code that a job ran with the code that its fingerprint was computed from.

Files may be edited between the two: while a stage waits for a device, or before a module is
imported late. What the workers loaded lies in the job's directory (runtime/code_record.py), so a
version counts as the same when its digest is, whatever became of the file since.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from flows.build.retry import TransientStageError
from flows.identity.fingerprint import CARRIERS, Code, Identity
from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.runtime.code_record import read_record


class CodeChanged(TransientStageError):
    """The job ran other code than its fingerprint covers; a new attempt has a new fingerprint."""


class CodeCheck:
    """Checks a job's record as it grows. `strict` is whether an unhashed module is an error."""

    def __init__(
        self,
        identity: Identity,
        job: Job,
        code: Code,
        *,
        strict: bool,
        warn: Callable[[str], None],
    ) -> None:
        hashed = identity.preimage["code"]
        assert isinstance(hashed, dict)
        self._hashed = hashed
        self._identity = identity
        self._job = job
        self._code = code
        self._strict = strict
        self._warn = warn
        self._seen = 0  # when the record last grew, in nanoseconds
        self._warned: set[str] = set()

    def __call__(self) -> None:
        """Check what was recorded since the last call.

        Raises CodeChanged when a file differs from what the fingerprint covers, and StageError when
        it covers no such file; of a module only if `strict`.
        """
        directory = self._job.code
        if not directory.exists() or (changed := directory.stat().st_mtime_ns) == self._seen:
            return
        self._check(directory)
        self._seen = changed  # a file that was added meanwhile is looked at again

    def discard_foreign_state(self) -> None:
        """Remove what an earlier attempt left, if other code than the fingerprint's made it."""
        try:
            self()
        except CodeChanged as error:
            self._warn(f"what an earlier attempt saved is not used: {error}")
            shutil.rmtree(self._job.directory)

    def check_complete(self) -> None:
        """Check all of it. Raises StageError when the job did not record what it ran."""
        self._seen = 0
        self()
        if self._job.entry not in {name for name, _ in read_record(self._job.code)}:
            raise StageError(f"{self._job.stage} did not record the code that it ran")

    def _check(self, directory: Path) -> None:
        names: set[str] = set()
        differing: set[str] = set()
        for name, content in read_record(directory):
            if content.strip():  # a package decides nothing; its modules are here by themselves
                names.add(name)
            if name in self._hashed and self._code.digest_of(name, content) != self._hashed[name]:
                differing.add(name)
        if differing:
            raise CodeChanged(
                f"{self._job.stage} ran other code than its fingerprint covers: "
                f"{', '.join(sorted(differing))}",
                hint="the files were edited meanwhile: run the same command again",
            )
        self._check_covered(leaked_modules(self._identity, names))

    def _check_covered(self, leaked: list[str]) -> None:
        text = f"{self._job.stage} ran code that its fingerprint does not see: "
        if files := [name for name in leaked if "/" in name]:
            raise StageError(
                text + ", ".join(files),
                hint="name each file by a string in a module beside it that the stage imports",
            )
        if new := sorted(set(leaked) - self._warned):
            if self._strict:
                hint = "import these modules by name in what the stage imports"
                raise StageError(text + ", ".join(new), hint=hint)
            self._warned.update(new)
            self._warn(text + ", ".join(new))


def leaked_modules(identity: Identity, loaded: Iterable[str]) -> list[str]:
    """Return what a job loaded although its fingerprint does not depend on it."""
    code = identity.preimage["code"]
    assert isinstance(code, dict)
    return [name for name in sorted(set(loaded)) if name not in code and name not in CARRIERS]
