"""`nanochat node`: build this machine's share of a stage request."""

from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from flows.building.stage_request import build_on_node, read_request
from flows.cli.train.run import resumable
from flows.cli.train.stage import exit_code_of
from infra.launch.rendezvous import find_gang
from nanochat_core.errors import NanochatError


def node(
    request: Annotated[str, Parameter(help="The request in JSON, as a run writes it.")], /
) -> int:
    """Build this machine's share of a stage that a run requests from Slurm or Kubernetes.

    They start this command on each machine, and say how many there are and which this one is. Exit
    codes are those of `nanochat stage`.
    """
    from flows.orchestration.local_run import stoppable

    gang = find_gang()
    asked = replace(read_request(request), nodes=gang.nodes)
    try:
        with resumable("the same command", stages=[asked.stage]) as display, stoppable(display):
            built = build_on_node(asked, node=gang.node, address=gang.address, watch=display.watch)
            display.say(f"{'cached' if built.cached else 'built'}  {built.uri}")
    except NanochatError as error:
        return exit_code_of(error)
    return 0
