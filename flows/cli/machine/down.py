"""`nanochat down`: stop the background processes that `nanochat up` and `nanochat run` started."""

from typing import TYPE_CHECKING

from flows.cli.options import StoreOptions
from flows.cli.output import screen

if TYPE_CHECKING:
    from infra.prefect.supervisor.control import StackStopped


def down(*, place: StoreOptions = StoreOptions()) -> int:  # noqa: B008 - frozen
    """Stop the workers and the local Prefect server. Artifacts, checkpoints and history stay.

    Runs in progress save first; those of deployments resume with the next `nanochat up`.
    """
    from infra.prefect.supervisor.control import stop_stack

    screen().print(_said(stop_stack(place.home_path)))
    return 0


def _said(stopped: "StackStopped") -> str:
    """Return a line with what was stopped."""
    what = [f"the worker of {pool}" for pool in stopped.workers]
    what += ["the Prefect server"] if stopped.server else []
    what += [f"{stopped.leftovers} processes left behind"] if stopped.leftovers else []
    if not what and not stopped.keeper:
        return "no Prefect server was running"
    return f"stopped: {', '.join(what or ['the keeper'])}"
