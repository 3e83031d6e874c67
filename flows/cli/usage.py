"""Wrong words on the command line, said in the same form as every other mistake."""

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
    """What is wrong with the command line, in one line and a hint."""
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
    text = " ".join(str(error).split()).rstrip(".")
    return ConfigError(text[:1].lower() + text[1:], hint=help_hint)


def did_you_mean(word: str, names: list[str]) -> str | None:
    """A question with the closest of `names`, or None when none is close."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


def _unknown_command(error: UnknownCommandError) -> ConfigError:
    word = error.unused_tokens[0] if error.unused_tokens else ""
    names = [name for name in (error.app or ()) if not name.startswith("-")]
    return ConfigError(
        f"unknown command '{word}'",
        hint=did_you_mean(word, names) or f"one of: {', '.join(names)}",
    )
