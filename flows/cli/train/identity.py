"""`nanochat identity`: write conversations for a name of one's own, and plan a run with them."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.runs import check_name
from flows.cli.options import DepthFlag, RunOptions, StoreOptions
from flows.cli.output import print_line, print_lines, print_warning
from flows.cli.requests import read_request
from flows.cli.train.plan import plan
from flows.persona import make_persona, parse_fact, persona_lines, slug, slug_reason, with_persona
from flows.profile_file import changes_to_toml
from flows.profiles import open_profile
from flows.run_request import shared
from infra.storage.files import write_whole, writing
from nanochat_core.errors import ConfigError
from tasks.generated.persona import Persona

_WRITTEN_BY = "Written by: nanochat identity"
_FACT = "A fact, such as home=a greenhouse in Oslo? [no more]"


def identity(
    name: str,
    /,
    *,
    maker: Annotated[str | None, Parameter(help=f"Who made it. Default: {Persona.maker}.")] = None,
    character: Annotated[
        str | None, Parameter(help=f"What it is, after its name. Default: {Persona.character}.")
    ] = None,
    fact: tuple[str, ...] = (),
    profile: str = "tiny",
    depth: DepthFlag = None,
    to: Path = Path(),
    force: bool = False,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Give a model a name, a character and facts: write its conversations, and show the plan.

    Writes NAME.jsonl, conversations that you may edit, and NAME.toml, a run whose midtraining, SFT
    and evaluation have them in place of those about nanochat. Trains nothing: `nanochat run
    NAME.toml` does. On a terminal without options it asks; Enter takes the default.

    Args:
        name: The name that the model gets.
        fact: A fact, as ABOUT=VALUE: home, color, food, hobby, age, or any other, such as "best
            friend=a hedgehog called Otto". May be repeated.
        profile: The profile that is trained with it, or its TOML file.
        to: Directory the two files go to.
        force: Replace the files if they exist.
    """
    options = RunOptions(**shared(RunOptions, place), depth=depth)
    request = read_request(profile, options)
    run = open_profile(
        request.profile, depth=request.depth, overrides=request.overrides, snapshots=False
    ).run
    _check_profile(profile)
    file = check_name(slug(name))  # of a run and its model
    data, settings = (to.expanduser() / f"{file}.{ending}" for ending in ("jsonl", "toml"))
    if (existing := [path for path in (data, settings) if path.exists()]) and not force:
        raise ConfigError(
            f"{existing[0]} exists", hint="choose another directory with --to, or add --force"
        )
    if (maker, character, fact) == (None, None, ()) and sys.stdin.isatty():
        maker, character, fact = _ask(name)
    found = make_persona(
        name,
        maker=Persona.maker if maker is None else maker,
        character=Persona.character if character is None else character,
        facts=fact,
    )
    about = [
        f"{found.name}: its conversations are in {data.name}. Run it: nanochat run {settings.name}",
        f"{_WRITTEN_BY} " + shlex.join(_again(found, profile, depth)),
    ]
    with writing(data, ConfigError, hint="choose another directory with --to"):
        data.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{line}\n" for line in persona_lines(run, found))
        write_whole(data, "".join(lines).encode())
        changed = with_persona(run, found, data.name)
        text = changes_to_toml(request, changed, name=file, about=about)
        write_whole(settings, text.encode())
    print_lines([f"{path}: written" for path in (data, settings)])
    if reason := slug_reason(found.name):
        print_line(f"files and run are called {file}: {reason}")
    print_line("")
    plan(str(settings), options=RunOptions(**shared(RunOptions, place)))
    where = shlex.join([str(settings), *place.argv])
    chat = shlex.join([file, *place.argv])
    print_lines(
        ["", f"train it:      nanochat run {where}", f"talk to it:    nanochat chat {chat}"]
    )


def _check_profile(profile: str) -> None:
    """Raise ConfigError for the file of another identity: the model would have two names."""
    path = Path(profile)
    if path.suffix == ".toml" and _WRITTEN_BY in path.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{profile} gives the model another name already",
            hint="take the profile that it was made from; its first lines have the command",
        )


def _ask(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return maker, character and facts as answered on the terminal."""
    maker = _answer(f"Who made it? [{Persona.maker}]") or Persona.maker
    character = _answer(f'What is it? "I am {name}, ..." [{Persona.character}]')
    facts: list[str] = []
    while fact := _answer(_FACT):
        try:
            parse_fact(fact)
        except ConfigError as error:
            print_warning(f"{error}: {error.hint}")
        else:
            facts.append(fact)
    return maker, character or Persona.character, tuple(facts)


def _answer(question: str) -> str:
    """Return what is typed on the terminal, "" for the end of the input."""
    with contextlib.suppress(EOFError):
        return input(f"{question} ").strip()
    return ""


def _again(found: Persona, profile: str, depth: int | None) -> list[str]:
    """Return the command that writes the files of a persona."""
    words = [found.name, "--maker", found.maker, "--character", found.character]
    words += [word for about, value in found.facts for word in ("--fact", f"{about}={value}")]
    words += [] if profile == "tiny" else ["--profile", profile]
    return words if depth is None else [*words, "--depth", str(depth)]
