"""Wrong words on the command line as errors in our form: one line and a hint."""

import difflib

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from nanochat_core.errors import ConfigError

# Words of other tools, and the commands here that do it. By letters `start` is near `status`.
_OTHER_WORDS = {
    "train": ("run",),
    "resume": ("run",),
    "start": ("run", "up"),
    "stop": ("down",),
    "list": ("ls",),
    "show": ("ls", "config"),
    "watch": ("status",),
    "eval": ("evals",),
    "help": ("--help",),
    "version": ("--version",),
}
_RESUMING = ("run", "sweep", "miniseries")  # given again, they continue


def usage_mistake(error: CycloptsError) -> ConfigError:
    """Return cyclopts' error as one line and a hint."""
    help_hint = f"see `{' '.join(['nanochat', *(error.command_chain or ())])} --help`"
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = [name for argument in error.argument_collection for name in argument.names]
        hint = did_you_mean(option, names) or help_hint
        # pretrain.num_steps is a setting, and nearest by letters to an option that is none.
        if "." in option and "--set" in names:
            hint = f"a setting is given like --set {option.lstrip('-')}=VALUE"
        elif option == "--resume" and (error.command_chain or ("",))[0] in _RESUMING:
            hint = "leave it out: the same command resumes"
        return ConfigError(f"unknown option {option}", hint=hint)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return ConfigError(f"unexpected argument '{error.unused_tokens[0]}'", hint=help_hint)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        if name.startswith("-"):
            return ConfigError(f"{name} needs a value", hint=help_hint)
        return ConfigError(f"{' '.join(error.command_chain or ())} needs {name}", hint=help_hint)
    if isinstance(error, ValidationError) and error.argument is not None:
        values = ", ".join(token.value for token in error.argument.tokens)
        return ConfigError(f"{error.argument.name} is {values}", hint=error.exception_message)
    # cyclopts writes sentences; our errors begin in lower case and have no full stop.
    text = " ".join(str(error).split()).rstrip(".")
    return ConfigError(text[:1].lower() + text[1:], hint=help_hint)


def did_you_mean(word: str, names: list[str]) -> str | None:
    """Return a question with the closest of `names`, or None if none is close."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


def _unknown_command(error: UnknownCommandError) -> ConfigError:
    word = error.unused_tokens[0] if error.unused_tokens else ""
    # An app iterates over its commands, among them --help and --version.
    names = [name for name in (error.app or ()) if not name.startswith("-")]
    meant = [name for name in _OTHER_WORDS.get(word, ()) if name in (error.app or ())]
    hint = f"did you mean {' or '.join(meant)}?" if meant else did_you_mean(word, names)
    return ConfigError(f"unknown command '{word}'", hint=hint or f"one of: {', '.join(names)}")
