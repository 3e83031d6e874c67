"""`nanochat deploy`: register our deployments and work pools with a Prefect server."""

import shlex
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import StoreOptions
from flows.cli.output import print_line, print_lines
from infra.placement import check_gpu_pool


def deploy(
    *,
    pool: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Another work pool that builds GPU stages; may be repeated. It stays known.",
        ),
    ] = (),
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
) -> int:
    """Register deployments and work pools with a Prefect server.

    The server is that of PREFECT_API_URL, or this machine's, started if need be. Given again, it
    changes what is out of date; what a person set in Prefect's pages stays. `nanochat up` does it
    too. A pool that exists is used, whatever its type: make it first for Kubernetes and the like.

    With NANOCHAT_WEBHOOK in the environment, alerts are posted to that address.
    """
    from flows.orchestration.local_run import connect
    from infra.prefect.access import configured_webhook

    for name in pool:
        check_gpu_pool(name)
    place.open_home()
    # Connect first: it sets PREFECT_API_URL, which Prefect reads when deployments import it.
    api_url = connect(place.home_path, print_line)
    from deployments.deploy import deploy_all, summary

    print_lines(summary(deploy_all(webhook=configured_webhook(), pools=pool)))
    # With the home, which has the password of its server.
    up = shlex.join(["nanochat", "up", *place.argv])
    print_line(f"next         PREFECT_API_URL={api_url} {up}, on each machine that works")
    return 0
