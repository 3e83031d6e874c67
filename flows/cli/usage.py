"""Wrong words on the command line as errors in our form: one line and a hint."""

import shlex
from collections.abc import Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from flows.artifacts.names import kind_of
from flows.profiles import setting_types
from infra.near import nearest, suggest
from infra.placement import SETTINGS
from nanochat_core.errors import ConfigError

# Words of other tools, and the commands here that do it. By letters `download` is near `down`.
_OTHER_WORDS = {
    **dict.fromkeys(("train", "resume"), ("run",)),
    "start": ("run", "up"),
    "stop": ("down",),
    **dict.fromkeys(("list", "show"), ("ls",)),
    **dict.fromkeys(("watch", "ps"), ("status",)),
    "download": ("fetch",),
    "upload": ("push",),
    "submit": ("run --submit",),
    "export": ("fetch --as hf",),
    **dict.fromkeys(("rm", "remove", "delete", "clean", "prune"), ("gc",)),
    "generate": ("chat",),
    "logs": ("status RUN --follow", "status RUN STAGE"),
}
# What is done with a name that was given without a command.
_USES = {
    "a profile": "run {}",
    "a stage": "ls --stage {}",
    "an artifact": "ls {}",
    "a setting": "run tiny --set {}",
}
_NEAR_OPTION = 0.75  # likeness; --steps has 0.71 with --store
_MAX_SHOWN = 3  # settings


def usage_mistake(error: CycloptsError) -> ConfigError:
    """Return cyclopts' error as one line and a hint."""
    hint = f"see `{' '.join(['nanochat', *(error.command_chain or ())])} --help`"
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = [name for argument in error.argument_collection for name in argument.names]
        if option == "--resume":
            hint = "leave it out: the same command resumes"
        return ConfigError(f"unknown option {option}", hint=_near_option(option, names) or hint)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        word = error.unused_tokens[0]
        hint = f"a setting is given like --set {word}" if "=" in word else hint
        return ConfigError(f"unexpected argument '{word}'", hint=hint)
    return ConfigError(_plain(str(error)), hint=hint)


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


def _near_option(option: str, names: Sequence[str]) -> str | None:
    """Return a hint: the option, or the settings, that are meant by an unknown option."""
    word = option.lstrip("-")
    found = nearest(f"--{word}", names, least=_NEAR_OPTION)[:1]
    for flag, known in (("--set", [*setting_types()]), ("--place", SETTINGS)):
        if flag in names and not found:
            near = nearest(word.replace("-", "_"), known, least=_NEAR_OPTION)
            found = [f"{flag} {name}=VALUE" for name in near[:_MAX_SHOWN]]
    return f"did you mean {', '.join(found)}?" if found else None
