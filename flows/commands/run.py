"""`nanochat run`: train, evaluate and keep everything a profile says."""

import contextlib
import importlib
import itertools
import shlex
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.commands.options import ProfileName, What, Where, profile_of
from flows.commands.terminal import print_error, screen
from flows.plan import make_plan, render
from flows.stages import STAGES
from infra.launch.torchrun import StageInterrupted

if TYPE_CHECKING:
    from flows.pipeline import Outcome


def run(
    profile: ProfileName,
    /,
    *,
    force: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Redo this stage although it is up to date; may be repeated.",
        ),
    ] = (),
    from_stage: Annotated[
        str | None, Parameter(help="Redo this stage and everything after it.")
    ] = None,
    what: What = What(),  # noqa: B008 - frozen
    where: Where = Where(),  # noqa: B008 - frozen
) -> int:
    """Run every stage that is not up to date, and keep what each one makes.

    Stopped by Ctrl-C, a crash or a lost machine, the same command goes on where it was.
    """
    where.check_gpus()
    chosen = profile_of(profile, what)
    placement = where.placement(chosen)
    # Here too, before anything is started: it refuses wrong stages and stores that are not there.
    planned = make_plan(
        chosen.run,
        where.open_store(),
        where.work,
        force=frozenset(force),
        from_stage=from_stage,
        placement=placement,
    )
    from rich.console import Console

    from flows.display import Display, duration

    began = time.monotonic()
    with (
        Display(Console(), stages=[stage.name for stage in STAGES]) as display,
        _stopped_like_ctrl_c(),
        _saying_how_to_go_on(_command(profile, what)),
    ):
        display.say(render(planned)[-1])
        ui_url = _connect(where.home_path, display.say)
        from flows.pipeline import CALLER, Caller, nanochat

        CALLER.set(Caller(home=where.home_path, watch=display.watch))
        outcome = nanochat(
            profile=profile,
            depth=what.depth,
            overrides=what.overrides,
            from_stage=from_stage,
            force=force,
            store=where.store_url,
            gpus=where.gpus,
        )
    took = duration(time.monotonic() - began)
    for line in _ending(outcome, profile, ui_url, took=took):
        screen().print(line)
    return 0


def _connect(home: Path, say: Callable[[str], None]) -> str:
    """Point Prefect at a server that answers; returns the address of its pages.

    Raises ServerError when none does.
    """
    from infra.prefect_server import (
        check_answers,
        configured_api_url,
        find_server,
        start_server,
        use_server,
        wait_for_server,
    )

    if shared := configured_api_url():
        check_answers(shared)
        use_server(home, shared, console_logs=False)
        return shared.removesuffix("/api")
    if find_server(home) is None:
        say("starting the Prefect server; a new home takes some ten seconds")
    server = start_server(home)
    use_server(home, server.api_url, console_logs=False)
    importlib.import_module("flows.pipeline")  # takes seconds, which the server needs too
    wait_for_server(home, server)
    return server.ui_url


@contextlib.contextmanager
def _stopped_like_ctrl_c() -> Generator[None]:
    """SIGTERM ends the run as Ctrl-C does: jobs save, the run is recorded as interrupted."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _saying_how_to_go_on(command: str) -> Generator[None]:
    """However the run is interrupted, it ends as Ctrl-C does and names the next command."""
    try:
        yield
    except (KeyboardInterrupt, StageInterrupted):
        print_error("interrupted", hint=f"go on where it was: {command}")
        raise KeyboardInterrupt from None


def _command(profile: str, what: What) -> str:
    words = ["nanochat", "run", profile]
    words += [] if what.depth is None else ["--depth", str(what.depth)]
    words += [word for override in what.overrides for word in ("--set", override)]
    return shlex.join(words)


def _ending(outcome: "Outcome", profile: str, ui_url: str, *, took: str) -> Iterator[str]:
    """What a person wants to know when a run is over."""
    cached = sum(built.cached for built in outcome.stages.values())
    yield ""
    yield f"{len(outcome.stages) - cached} stages built, {cached} cached, in {took}"
    if outcome.report:
        yield from _headline(outcome.report.with_name("report.md"))
        yield f"report card  {outcome.report}"
    yield f"Prefect      {ui_url}"
    yield f"next         nanochat chat {profile}"
    yield f"             nanochat serve {profile}"


def _headline(report: Path) -> list[str]:
    """The numbers that the report card opens with: its first list."""
    lines = report.read_text(encoding="utf-8").splitlines()
    first_list = itertools.takewhile(
        lambda line: line.startswith("- "),
        itertools.dropwhile(lambda line: not line.startswith("- "), lines),
    )
    return [line.removeprefix("- ") for line in first_list]
