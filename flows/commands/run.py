"""`nanochat run`: train, evaluate and keep everything a profile says."""

from typing import Annotated

from cyclopts import Parameter

from flows.commands.options import ProfileName, What, Where, profile_of


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
    chosen = profile_of(profile, what)
    placement = where.placement(chosen)
    raise NotImplementedError(placement, force, from_stage)
