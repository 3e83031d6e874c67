"""The `nanochat` command line: its commands, and how every mistake of a person is answered.

A mistake ends as `error: ...` and `hint: ...` on stderr with exit code 1, never as a traceback. Our
own bugs raise. Commands import what is slow (torch, Prefect, rich's progress bars) inside their
functions: `nanochat --help` and `nanochat plan` answer at once.
"""

import errno
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Group

from flows.commands.accept import accept
from flows.commands.bench import make_bench_app
from flows.commands.chat import chat
from flows.commands.compare import compare
from flows.commands.data import make_data_app
from flows.commands.deploy import deploy
from flows.commands.diff import diff
from flows.commands.doctor import doctor
from flows.commands.down import down
from flows.commands.evals import make_evals_app
from flows.commands.explain import explain
from flows.commands.export import export
from flows.commands.fetch import fetch
from flows.commands.gc import gc
from flows.commands.import_model import import_model
from flows.commands.ls import ls
from flows.commands.miniseries import miniseries
from flows.commands.plan import plan
from flows.commands.profiles import profiles
from flows.commands.push import push
from flows.commands.report import report
from flows.commands.revoke import revoke
from flows.commands.run import run
from flows.commands.serve import serve
from flows.commands.sql import sql
from flows.commands.stage import stage
from flows.commands.status import status
from flows.commands.tag import tag
from flows.commands.terminal import print_error, print_mistake
from flows.commands.up import up
from nanochat_core.errors import NanochatError

INTERRUPTED = 130  # what a shell reports for Ctrl-C

_ABOUT = "Train your own ChatGPT as a pipeline you can stop, resume, schedule and trust."
_TRAIN = Group("Train", sort_key=1)
_USE = Group("Use", sort_key=2)
_ARTIFACTS = Group("Artifacts", sort_key=3)
_MACHINE = Group("This machine", sort_key=4)
_COMMANDS = (
    (plan, _TRAIN),
    (run, _TRAIN),
    (stage, _TRAIN),
    (miniseries, _TRAIN),
    (status, _TRAIN),
    (explain, _TRAIN),
    (accept, _TRAIN),
    (profiles, _TRAIN),
    (chat, _USE),
    (serve, _USE),
    (fetch, _USE),
    (push, _USE),
    (import_model, _USE),
    (export, _USE),
    (report, _USE),
    (ls, _ARTIFACTS),
    (tag, _ARTIFACTS),
    (diff, _ARTIFACTS),
    (compare, _ARTIFACTS),
    (sql, _ARTIFACTS),
    (revoke, _ARTIFACTS),
    (gc, _ARTIFACTS),
)
_MACHINE_COMMANDS = ((doctor, _MACHINE), (up, _MACHINE), (deploy, _MACHINE), (down, _MACHINE))
_CALLED: dict[Callable[..., int], str] = {
    import_model: "import"
}  # whose function cannot be called so
_ALSO_CALLED: dict[Callable[..., int], tuple[str, ...]] = {fetch: ("pull",)}
# Where cyclopts itself would say [ARGS] for words that may be left out.
_WORDS: dict[Callable[..., int], str] = {
    status: "[OPTIONS] [RUN]",
    fetch: "[OPTIONS] REF [PATH]",
    push: "--to STR [OPTIONS] REF...",
    ls: "[OPTIONS] [REF]",
    tag: "[OPTIONS] [NAME] [REF]",
    compare: "[OPTIONS] REF REF...",
    sql: "[OPTIONS] [QUERY]",
}
_FACTS_OF_THE_MACHINE = {
    errno.ENOSPC: "free some space, or give another directory with --home",
    errno.EDQUOT: "free some space, or give another directory with --home",
    errno.EACCES: "choose a directory you may write to, for example with --home",
    errno.EPERM: "choose a directory you may write to, for example with --home",
    errno.EROFS: "choose a directory you may write to, for example with --home",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `arguments` default to those of the process."""
    try:
        code = _call(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is met inside this function
    except NanochatError as error:
        print_mistake(error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _settle_stdout()
        return 1
    except OSError as error:
        if error.errno not in _FACTS_OF_THE_MACHINE:
            raise
        _settle_stdout()
        where = f": {error.filename}" if error.filename else ""
        print_error(
            f"{(error.strerror or str(error)).lower()}{where}",
            hint=_FACTS_OF_THE_MACHINE[error.errno],
        )
        return 1
    return code


def make_app(called: str = "") -> App:
    """All commands. `called` is the one that was asked for, which may have several names."""
    app = App(
        name="nanochat",
        help=_ABOUT,
        version=lambda: importlib.metadata.version("nanochat-flows"),
        help_format="plaintext",
        group_commands=Group("Options", sort_key=9),
        group_parameters=Group("Options", sort_key=9),
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place, (command, group) in enumerate(_COMMANDS):
        names = (_CALLED.get(command, command.__name__), *_ALSO_CALLED.get(command, ()))
        name = called if called in names else names[0]
        words = _WORDS.get(command)
        app.command(
            command,
            name=names,
            group=group,
            sort_key=place,
            help=_unwrap(command.__doc__ or ""),
            usage=None if words is None else f"Usage: nanochat {name} {words}\n",
        )
    app.command(make_data_app(group=_ARTIFACTS, sort_key=len(_COMMANDS)))
    app.command(make_evals_app(group=_ARTIFACTS, sort_key=len(_COMMANDS) + 1))
    for place, (command, group) in enumerate(_MACHINE_COMMANDS):
        app.command(command, group=group, sort_key=place, help=_unwrap(command.__doc__ or ""))
    app.command(make_bench_app(group=_MACHINE, sort_key=len(_MACHINE_COMMANDS)))
    return app


def _unwrap(text: str) -> str:
    """A docstring with one line a paragraph, for a terminal of whatever width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _call(arguments: Sequence[str]) -> int:
    try:
        return make_app(arguments[0] if arguments else "")(arguments) or 0
    except CycloptsError as error:
        from flows.commands.usage import usage_mistake

        print_mistake(usage_mistake(error))
        return 1


def _settle_stdout() -> None:
    """Write what is left; if nobody takes it, keep the interpreter from failing again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
