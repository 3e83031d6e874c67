"""Wrong words on the command line as errors in our form: one line and a hint."""

import re
import shlex
from collections.abc import Iterable, Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from flows.artifacts.names import kind_of
from flows.profiles import setting_types
from infra.near import nearest, suggest
from infra.placement import SETTINGS
from nanochat_core.errors import ConfigError

# Words of other tools, and the commands here that do it. By letters `start` is near `status`.
_OTHER_WORDS = {
    **dict.fromkeys(("train", "resume"), ("run",)),
    "start": ("run", "up"),
    "stop": ("down",),
    "list": ("ls",),
    "show": ("ls", "config"),
    **dict.fromkeys(("watch", "ps"), ("status",)),
    "node": ("stage",),
    "submit": ("run --submit",),
    "deploy": ("up --register",),
    "export": ("fetch --as hf",),
    "eval": ("evals",),
    **dict.fromkeys(("rm", "remove", "delete", "clean", "prune"), ("gc",)),
    "download": ("fetch",),
    "upload": ("push",),
    **dict.fromkeys(("ask", "generate"), ("chat",)),
    "server": ("serve", "up"),
    "history": ("status", "compare"),
    "diff": ("compare",),
    "profiles": ("config",),
    "logs": ("status RUN --follow", "status RUN STAGE"),
    "explain": ("plan PROFILE STAGE",),
    "info": ("plan PROFILE STAGE", "ls"),
}
# What is done with a name that was given without a command.
_USES = {
    "a profile": "run {}",
    "a stage": "ls --stage {}",
    "an artifact": "ls {}",
    "a setting": "run tiny --set {}",
}
_RESUMING = ("run", "sweep", "miniseries")  # given again, they continue
_NEAR_OPTION = 0.8  # likeness; --steps has 0.71 with --store
_MAX_SHOWN = 3  # settings


def usage_mistake(error: CycloptsError) -> ConfigError:
    """Return cyclopts' error as one line and a hint."""
    help_hint = f"see `{' '.join(['nanochat', *(error.command_chain or ())])} --help`"
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = [name for argument in error.argument_collection for name in argument.names]
        if option == "--resume" and (error.command_chain or ("",))[0] in _RESUMING:
            hint = "leave it out: the same command resumes"
        else:
            hint = _near_option(option, names, error.root_input_tokens or ()) or help_hint
        return ConfigError(f"unknown option {option}", hint=hint)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        hint = _unexpected(error.unused_tokens[0], error) or help_hint
        return ConfigError(f"unexpected argument '{error.unused_tokens[0]}'", hint=hint)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        if name.startswith("-"):
            return ConfigError(f"{name} needs a value", hint=help_hint)
        return ConfigError(f"{' '.join(error.command_chain or ())} needs {name}", hint=help_hint)
    if isinstance(error, ValidationError) and error.argument is not None:
        values = ", ".join(token.value for token in error.argument.tokens)
        return ConfigError(
            f"{error.argument.name} is {values}", hint=_plain(error.exception_message)
        )
    return ConfigError(_plain(str(error)), hint=help_hint)


def _plain(text: str) -> str:
    """Return a sentence of cyclopts as our errors are: in lower case, without a full stop."""
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _unknown_command(error: UnknownCommandError) -> ConfigError:
    word, *rest = error.unused_tokens or [""]
    # An app iterates over its commands, among them --help. `flows.cli.app` answers the last two.
    names = [name for name in (error.app or ()) if not name.startswith("-")] + ["help", "version"]
    if meant := [name for name in _OTHER_WORDS.get(word, ()) if name.split()[0] in names]:
        hint = f"did you mean {' or '.join(meant)}?"
    elif kind := kind_of(word):
        after = rest and rest[0] in names
        use = shlex.join([rest[0], word, *rest[1:]]) if after else _USES[kind].format(word)
        hint = f"it is {kind}: nanochat {use}"
    else:
        hint = (
            suggest(word, names) if nearest(word, names) else "`nanochat --help` lists the commands"
        )
    return ConfigError(f"unknown command '{word}'", hint=hint)


def _near_option(option: str, names: Sequence[str], given: Sequence[str]) -> str | None:
    """Return a hint: the option, or the settings, that are meant by an unknown option."""
    word = option.lstrip("-")
    if near := nearest(f"--{word}", names, least=_NEAR_OPTION):
        return f"did you mean {near[0]}?"
    after = [*given, ""][given.index(option) + 1] if option in given else ""
    value = next((each.partition("=")[2] for each in given if each.startswith(f"{option}=")), after)
    value = value if value and not value.startswith("-") else "VALUE"
    found = _with_words_of(word, names)
    if "--set" in names:
        settings = setting_types()
        likely = _with_words_of(word, settings) or (nearest(word, settings) if "." in word else [])
        found += [f"--set {name}={value}" for name in likely]
    if "--place" in names:
        found += [f"--place {name}={value}" for name in _with_words_of(word, SETTINGS)]
    return f"did you mean {', '.join(found[:_MAX_SHOWN])}?" if found else None


def _with_words_of(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that have all parts of `word`, such as num_steps of steps.

    Only those with the fewest other parts.
    """
    wanted = _parts(word)
    others = {name: len(_parts(name) - wanted) for name in names if wanted <= _parts(name)}
    return [name for name, number in others.items() if number == min(others.values())]


def _parts(name: str) -> set[str]:
    return set(re.split(r"[-_.]", name.lstrip("-")))


def _unexpected(word: str, error: CycloptsError) -> str | None:
    """Return a hint for a word that a command does not take: the option that it belongs to."""
    arguments = error.app.assemble_argument_collection() if error.app else ()
    names = {name for argument in arguments for name in argument.names}
    match kind_of(word):
        case "a setting" if "--set" in names:
            return f"a setting is given like --set {word}"
        case "a stage" if "--stage" in names:
            return f"a stage is given like --stage {word}"
        case _:
            return f"did you mean --{word}?" if f"--{word}" in names else None
