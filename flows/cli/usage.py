"""Wrong words on the command line as errors in our form: one line and a hint."""

import difflib

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from nanochat_core.errors import ConfigError


def usage_mistake(error: CycloptsError) -> ConfigError:
    """Return cyclopts' error as one line and a hint."""
    help_hint = f"see `{' '.join(['nanochat', *(error.command_chain or ())])} --help`"
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = [name for argument in error.argument_collection for name in argument.names]
        return ConfigError(
            f"unknown option {option}", hint=did_you_mean(option, names) or help_hint
        )
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return ConfigError(f"unexpected argument '{error.unused_tokens[0]}'", hint=help_hint)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        if name.startswith("-"):
            return ConfigError(f"{name} needs a value", hint=help_hint)
        return ConfigError(f"{' '.join(error.command_chain or ())} needs {name}", hint=help_hint)
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
    return ConfigError(
        f"unknown command '{word}'",
        hint=did_you_mean(word, names) or f"one of: {', '.join(names)}",
    )
