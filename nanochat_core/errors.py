"""Errors that a user can act on.

    NanochatError
    |-- ConfigError     an invalid profile, override or value
    |-- DataError       input text, a dataset or a row file that cannot be used
    |-- ModelError      a directory that is not a model, or weights that do not fit
    |-- StoreError      the artifact store cannot be reached or refuses
    |-- ArtifactError   an artifact is missing, damaged or not what its manifest says
    `-- StageError      a stage's job failed or was interrupted
        `-- OutOfMemory half the device batch size may fit

The message is one line: lower case, what is wrong, with both values. `hint` is one line on what to
do. The user sees both and no traceback; bugs are ordinary exceptions with a traceback.
"""


class NanochatError(Exception):
    """A user's mistake or a fact of the machine, shown as one line and a hint."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(NanochatError, ValueError):
    """An invalid profile, override or value."""


class DataError(NanochatError):
    """Input text, a dataset or a row file that cannot be used."""


class ModelError(NanochatError):
    """A directory that is not a model, or weights that do not fit its config."""


class StoreError(NanochatError):
    """The artifact store cannot be reached or refuses. It must not be taken for "not found"."""


class ArtifactError(NanochatError):
    """An artifact is missing, damaged, or not what its manifest says."""


class StageError(NanochatError):
    """A stage's job failed or was interrupted."""


class OutOfMemory(StageError):
    """A job ran out of memory; with half its device batch size it may fit."""


def reason_of(error: OSError) -> str:
    """Return why the system refused, without a path: "no space left on device"."""
    return (error.strerror or str(error)).lower()


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, or the error's type if it has no message."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__
