"""The `nanochat` command line: the table of its commands, and the entry point that runs one.

A user's mistake ends as `error: ...` and `hint: ...` on stderr, never as a traceback. The exit code
is 2 if the command line cannot be parsed, else 1. Bugs raise. Only the module of the requested
command is imported, none for the list of commands, and commands import slow packages (torch,
Prefect, rich's progress bars) inside their functions, so that `nanochat plan` starts at once.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.output import open_closed_streams, print_error, replace_unknown
from nanochat_core.errors import ConfigError, NanochatError, reason_of

if TYPE_CHECKING:
    from cyclopts import App

WRONG_USAGE = 2
INTERRUPTED = 130  # what a shell reports for Ctrl-C

_ABOUT = "Train your own ChatGPT as a pipeline you can stop, resume, schedule and trust."
_TRAIN, _USE, _ARTIFACTS, _MACHINE = "train", "use", "artifacts", "machine"  # folders of commands
# Titles of the groups, in the order of the help.
_TITLES = {_TRAIN: "Train", _USE: "Use", _ARTIFACTS: "Artifacts", _MACHINE: "This machine"}


@dataclass(frozen=True, kw_only=True)
class _Command:
    """One command: the function called as its module."""

    name: str
    folder: str  # of its module in flows/cli; also its group in the help
    aliases: tuple[str, ...] = ()
    function: str = ""  # "" means that the module has the command's name
    usage: str | None = None  # replaces cyclopts' own, which shows optional words as [ARGS]

    @property
    def module(self) -> str:
        """Return the name of the module, and of the function in it."""
        return self.function or self.name

    def summary(self) -> str:
        """Return the first paragraph of the help, read from the command's source file."""
        path = Path(__file__).parent / self.folder / f"{self.module}.py"
        # Not imported: all modules together take longer than the rest of `nanochat --help`.
        docstring = re.search(
            rf'^def {self.module}\(.*?"""(.+?)(\n\n|""")',
            path.read_text(encoding="utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        assert docstring is not None, f"{path} has no docstring"
        return " ".join(docstring[1].split())


# In the order in which the help lists them inside their group.
_COMMANDS = (
    _Command(name="plan", folder=_TRAIN, usage="[OPTIONS] PROFILE [STAGE]"),
    _Command(name="run", folder=_TRAIN),
    _Command(name="stage", folder=_TRAIN, usage="[OPTIONS] PROFILE STAGE"),
    _Command(name="sweep", folder=_TRAIN, aliases=("miniseries",)),
    _Command(name="status", folder=_TRAIN, usage="[OPTIONS] [RUN [STAGE]]"),
    _Command(name="accept", folder=_TRAIN),
    _Command(name="config", folder=_TRAIN, usage="[OPTIONS] [PROFILE]"),
    _Command(name="identity", folder=_TRAIN, usage="[OPTIONS] NAME"),
    _Command(name="chat", folder=_USE),
    _Command(name="serve", folder=_USE),
    _Command(name="fetch", folder=_USE, aliases=("pull",), usage="[OPTIONS] REF [PATH]"),
    _Command(name="push", folder=_USE, usage="--to STR [OPTIONS] REF..."),
    _Command(name="import", folder=_USE, function="import_model"),
    _Command(name="report", folder=_USE),
    _Command(name="ls", folder=_ARTIFACTS, usage="[OPTIONS] [REF]"),
    _Command(name="tag", folder=_ARTIFACTS, usage="[OPTIONS] [NAME] [REF]"),
    _Command(name="compare", folder=_ARTIFACTS, usage="[OPTIONS] REF REF..."),
    _Command(name="sql", folder=_ARTIFACTS, usage="[OPTIONS] [QUERY]"),
    _Command(name="revoke", folder=_ARTIFACTS),
    _Command(name="gc", folder=_ARTIFACTS),
    _Command(name="data", folder=_ARTIFACTS),
    _Command(name="evals", folder=_ARTIFACTS, usage="[OPTIONS] [MODEL]"),
    _Command(name="doctor", folder=_MACHINE),
    _Command(name="up", folder=_MACHINE),
    _Command(name="down", folder=_MACHINE),
    _Command(name="infra", folder=_MACHINE),
    _Command(name="bench", folder=_MACHINE, usage="[OPTIONS] [REF]"),
    _Command(name="completion", folder=_MACHINE),
)
# Errors of the machine, each with its hint. Any other OSError is a bug and keeps its traceback.
_WHICH = "--home for work and history, else the path that the command is given"
_FULL = f"free some space, or choose another place: {_WHICH}"
_LOCKED = f"choose a place you may write to: {_WHICH}"
_MACHINE_ERRORS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _LOCKED),
    errno.ENOTDIR: "a part of that path is a file: choose another path",
    errno.ENAMETOOLONG: "give a shorter name or path",
}
_FLAGS = {"help": "--help", "version": "--version"}  # as commands
_NO_HOME = "Could not determine home directory."  # by Path.expanduser, as a RuntimeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` default to those of the process."""
    open_closed_streams()
    replace_unknown(sys.stdout)
    try:
        code = _call(sys.argv[1:] if arguments is None else arguments)
        # Flush inside the try: a full disk or a closed pipe must raise here. At interpreter exit it
        # would print a traceback and change the exit code to 120.
        sys.stdout.flush()
    except NanochatError as error:
        print_error(str(error), hint=error.hint)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED  # silent: a command that can resume has printed how
    except BrokenPipeError:  # the reader has closed its end, as in `nanochat ls | head -1`
        _settle_stdout()
        return 1
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            raise
        _settle_stdout()
        where = f": {error.filename}" if error.filename else ""
        print_error(f"{reason_of(error)}{where}", hint=_MACHINE_ERRORS[error.errno])
        return 1
    except RuntimeError as error:
        if str(error) != _NO_HOME:
            raise
        print_error(
            "the ~ of a path names a user without a home directory",
            hint="write the path out; `~/` is your own home directory",
        )
        return 1
    return code


def make_app(*, is_list: bool = False) -> "App":
    """Return the command line, which imports the module of a command when that is called.

    With `is_list` it is for the list of commands alone, for which none of them is imported.
    """
    from cyclopts import App, Group, Parameter

    # The help shows the groups in this order; cyclopts would sort them by name.
    groups = {
        folder: Group(title, sort_key=1 + rank)
        for rank, (folder, title) in enumerate(_TITLES.items())
    }
    app = App(
        name="nanochat",
        help=_ABOUT,
        version=_version,
        version_flags=("--version", "-V"),
        help_format="markdown",
        group_commands=Group("Options", sort_key=9),
        # Help is in the docstrings of commands: no `--no-plan`, and no default that is no value.
        default_parameter=Parameter(negative="", show_default=_default),
        # A command's own options come before those that it shares with others (WHAT, WHERE).
        group_parameters=Group("Options", sort_key=0),
        # By default cyclopts prints errors in a box of its own and exits. Here they are raised, and
        # `main` shows them in the form of all other errors.
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for rank, command in enumerate(_COMMANDS):
        app.command(
            f"flows.cli.{command.folder}.{command.module}:{command.module}",
            name=(command.name, *command.aliases),
            group=groups[command.folder],
            sort_key=rank,
            help=command.summary() if is_list else None,
            usage=command.usage and f"Usage: nanochat {command.name} {command.usage}",
        )
    return app


def _version() -> str:
    # Imported here: it takes longer to import than this module.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nanochat-flows")
    except PackageNotFoundError:
        raise ConfigError("this checkout is not installed", hint="run `make setup`") from None


def _default(value: Any) -> Any:
    """Return a default as the help shows it, or None for one that means "not given"."""
    return None if value in (None, ()) or value is False else value


def _call(arguments: Sequence[str]) -> int:
    arguments = [*(_FLAGS.get(word, word) for word in arguments[:1]), *arguments[1:]]
    is_list = all(word.startswith("-") for word in arguments)
    from cyclopts import CycloptsError

    try:
        return make_app(is_list=is_list)(arguments) or 0
    except CycloptsError as error:
        from flows.cli.usage import usage_mistake  # needed for mistakes only

        mistake = usage_mistake(error)
        print_error(str(mistake), hint=mistake.hint)
        return WRONG_USAGE


def _settle_stdout() -> None:
    """Flush stdout; if that fails, point it at /dev/null."""
    try:
        sys.stdout.flush()
    except OSError:
        # The interpreter flushes stdout again at exit and would print the error a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
