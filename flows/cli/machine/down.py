"""`nanochat down`: stop what `nanochat up` runs, and the server that `nanochat run` started."""

from flows.cli.options import StoreOptions
from flows.cli.output import print_line


def down(
    *,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Stop the workers and the local Prefect server. Artifacts, checkpoints and history stay.

    Runs in progress save first; those of deployments resume with the next `nanochat up`.
    """
    from infra.prefect.server import stop_stack

    is_stopped = stop_stack(place.home_path)
    print_line("stopped" if is_stopped else "no Prefect server was running")
