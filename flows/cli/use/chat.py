"""`nanochat chat`: talk to a model in the terminal."""

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.models import open_named_model
from flows.cli.options import GpusFlag, ModelName, StoreOptions, device_of
from flows.cli.output import (
    count_of,
    print_error,
    print_line,
    print_warning,
    replace_unknown,
    screen,
    styled,
)
from flows.cli.use.chat_session import ChatSession, Sampling
from nanochat_core.errors import ConfigError, NanochatError

if TYPE_CHECKING:
    from nanochat_core.server.text import TextPiece

# Unicode's direction marks: an answer must not reverse the text around it.
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Control characters: an answer must not move the cursor, set the title or paste.
_UNSEEN = dict.fromkeys({*range(32), *range(127, 160), *_BIDI} - {ord("\n"), ord("\t")})

_HELP = """\
/temperature N   0 is greedy; higher is more random (max 2); without N, shows it
/topk N          draw from the N likeliest tokens; 0: from all
/maxtokens N     length limit of one answer
/seed N          the same seed gives the same answers
/clear           forget the conversation
/help            this list
/quit            leave
Ctrl-C stops an answer, twice in a row at the prompt it leaves; Ctrl-D leaves."""

_SETTINGS: dict[str, tuple[str, Callable[[str], float]]] = {
    "/temperature": ("temperature", float),
    "/topk": ("top_k", int),
    "/maxtokens": ("max_tokens", int),
    "/seed": ("seed", int),
}
_MAX_LINES = 1000  # of the history
_TINY = 100_000_000  # parameters: smaller models write mostly nonsense; the greeting says so


def chat(
    model: ModelName,
    /,
    *,
    prompt: Annotated[str | None, Parameter(name=["--prompt", "-p"])] = None,
    temperature: float = 0.6,
    top_k: int = 50,
    max_tokens: int = 256,
    seed: int = 42,
    gpus: GpusFlag = None,
    where: StoreOptions = StoreOptions(),
) -> None:
    """Talk to a model: `tiny` (its newest chat model), `sft@tiny`, a directory, or hf://OWNER/NAME.

    Args:
        prompt: Answer this once and exit.
        temperature: 0 is greedy; higher is more random (max 2).
        top_k: Draw from this many likeliest tokens; 0: all.
        max_tokens: Length limit of one answer.
        seed: The same seed gives the same answers.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, max_tokens=max_tokens, seed=seed)
    replace_unknown(sys.stdin)
    device = device_of(gpus)
    directory = open_named_model(where, model)
    # On a terminal: compiling takes half a minute, once on a machine.
    note = "loading the model; the first time its kernels are compiled"
    with screen(stderr=True).status(note) if prompt is None else contextlib.nullcontext():
        session = ChatSession.open(directory, sampling=sampling, device=device)
    if prompt is not None:  # for scripts: only the answer, and no history
        say_answer(session.answer(prompt))
        _say("\n")
        return
    _talk(session, history=where.home_path / "chat_history")


def _talk(session: ChatSession, *, history: Path) -> None:
    """Answer lines of input until it ends or /quit."""
    if interactive := sys.stdin.isatty():
        size = f"{session.parameters:,} parameters"
        if session.parameters < _TINY:
            size += ": a tiny model, which knows almost nothing and often writes nonsense"
        print_line(f"{size}.")
        print_line("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    with _line_editing(history) if interactive else contextlib.nullcontext():
        while (text := _ask(interactive)) not in (None, "/quit"):
            try:
                _turn(session, text)
            except NanochatError as error:
                print_error(str(error), hint=error.hint)
            except KeyboardInterrupt:  # a second Ctrl-C, while the first one was being handled
                if not interactive:
                    raise
                _say("\n")


def _ask(interactive: bool) -> str | None:
    """Return the next line of input; None at its end or after two Ctrl-C."""
    interrupted = False
    while True:
        try:
            return input("> " if interactive else "").strip()
        except EOFError:
            _say("\n" if interactive else "")
            return None
        except KeyboardInterrupt:
            if not interactive:  # input from a pipe: Ctrl-C ends the command
                raise
            _say("\n")
            if interrupted:
                return None
            interrupted = True
            print_line("Ctrl-C again leaves.")


def _turn(session: ChatSession, text: str) -> None:
    if text.startswith("/"):
        _say(_command(session, text) + "\n")
        return
    if not text:
        return
    forgotten = session.forgotten
    pieces = session.answer(text)
    try:
        say_answer(pieces)
    except KeyboardInterrupt:
        # Ends the answer's tokens, so that the text so far stays in the conversation.
        pieces.close()
        _say(" [stopped]")
    _say("\n")
    if dropped := session.forgotten - forgotten:
        print_warning(f"context full: dropped {count_of(dropped, 'earlier turn')}")


def _command(session: ChatSession, text: str) -> str:
    """Execute a line that begins with a slash, and return what to print."""
    name, *values = text.split()
    match name, values:
        case "/help", []:
            return _HELP
        case "/clear", []:
            session.clear()
            return "forgotten"
        case _, [] | [_] if name in _SETTINGS:
            return _setting(session, name, *values)
        case _:
            raise ConfigError(f"there is no command '{text}'", hint="/help lists them")


def _setting(session: ChatSession, command: str, value: str | None = None) -> str:
    """Set a sampling parameter if a value is given; return its current value as text."""
    name, parse = _SETTINGS[command]
    if value is not None:
        try:
            number = parse(value)
        except ValueError as error:
            raise ConfigError(f"'{value}' is not a number") from error
        session.sampling = replace(session.sampling, **{name: number})
        if name == "seed":  # a new seed also starts the count of answers again
            session.num_answers = 0
    return f"{name} {getattr(session.sampling, name)}"


def say_answer(pieces: "Iterable[TextPiece]") -> None:
    """Print an answer as it comes. Only a terminal gets the calculator calls, scripts the text."""
    if sys.stdout.isatty():
        for text, style in _with_calls(pieces):
            _say(text, style)
        return
    for piece in pieces:
        if piece.kind == "text":
            _say(piece.text)


def _with_calls(pieces: "Iterable[TextPiece]") -> Iterator[tuple[str, str]]:
    """Yield (text, style) of an answer whose calls read `[calculator: 12*3 = 36]`."""
    last = "\n"  # character
    is_open = is_after_call = False  # open: a call that has no result yet
    for piece in pieces:
        if piece.kind == "tool_result":
            if is_open:
                yield f" = {piece.text}]", "dim"
            is_open = False
            continue
        if is_open:
            yield "]", "dim"
        is_open = piece.kind == "tool_call"
        text = piece.text
        if is_open:
            yield ("" if last.isspace() else " ") + f"[calculator: {text}", "dim"
            last, is_after_call = "]", True
            continue
        if is_after_call and piece.marker is not None:
            text = "\n"  # the final number is a line of its own
        elif is_after_call and text[:1].isalnum():
            text = f" {text}"
        if text:
            yield text, ""
            last, is_after_call = text[-1], False
    if is_open:
        yield "]", "dim"


def _say(text: str, style: str = "") -> None:
    """Write and flush `text` without control characters, which could change the terminal."""
    sys.stdout.write(styled(text.translate(_UNSEEN), style, sys.stdout))
    sys.stdout.flush()


@contextlib.contextmanager
def _line_editing(history: Path) -> Generator[None]:
    """Give `input` arrow keys and a history, stored in a file between sessions."""
    try:
        import readline
    except ImportError:  # not every Python is built with readline
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    before = readline.get_current_history_length()
    readline.set_history_length(_MAX_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a conversation is not worth failing over its history
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)  # prompts are private
            # Appended, so that of two concurrent sessions neither loses its lines.
            new = readline.get_current_history_length() - before
            readline.append_history_file(new, history)
