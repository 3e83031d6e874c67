"""`nanochat down`: stop what runs in the background."""

from flows.commands.options import Place
from flows.commands.terminal import screen


def down(*, place: Place = Place()) -> int:  # noqa: B008 - frozen
    """Stop the local Prefect server. Artifacts, checkpoints and its history stay."""
    from infra.prefect_server import stop_server

    stopped = stop_server(place.home_path)
    screen().print("the Prefect server is stopped" if stopped else "no Prefect server was running")
    return 0
