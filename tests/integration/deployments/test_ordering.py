"""Events of runs are not held back by a restart of the server."""

import asyncio
import os
import time
import uuid
from datetime import UTC, datetime

import psutil
import pytest

STARTED = psutil.Process().create_time()


def id_made_at(moment: float) -> uuid.UUID:
    """As the server makes them: version 7, which begins with the milliseconds."""
    milliseconds = int(moment * 1000).to_bytes(6, "big")
    return uuid.UUID(bytes=milliseconds + b"\x70\x00\x80" + os.urandom(7))


def takes_at_once(follows: uuid.UUID) -> bool:
    """Whether an event that follows another one is taken when it comes."""
    # Here: a second that only this file's worker spends.
    from prefect.server.events.ordering import EventArrivedEarly
    from prefect.server.events.schemas.events import ReceivedEvent, Resource

    from deployments.ordering import CausalOrdering

    event = ReceivedEvent(
        id=id_made_at(time.time()),
        occurred=datetime.now(UTC),
        received=datetime.now(UTC),
        event="prefect.flow-run.Crashed",
        resource=Resource({"prefect.resource.id": "prefect.flow-run.1"}),
        follows=follows,
    )

    async def never(event: ReceivedEvent, depth: int = 0) -> None:
        raise AssertionError("nobody follows it")

    async def take() -> bool:
        held = CausalOrdering(scope=uuid.uuid4().hex).preceding_event_confirmed(never, event)
        try:
            async with held:
                return True
        except EventArrivedEarly:
            return False

    return asyncio.run(take())


def test_what_an_earlier_server_took_is_not_waited_for() -> None:
    assert takes_at_once(id_made_at(STARTED - 5))


def test_what_this_server_will_take_is_waited_for() -> None:
    assert not takes_at_once(id_made_at(STARTED + 0.1))


def test_an_id_that_says_no_time_is_waited_for() -> None:
    assert not takes_at_once(uuid.uuid4())


def test_prefect_finds_what_it_wants_in_the_module() -> None:
    from prefect.server.events.ordering import CausalOrderingModule

    from deployments import ordering

    assert isinstance(ordering, CausalOrderingModule)


@pytest.mark.parametrize("name", ["event_has_been_seen", "wait_for_leader"])
def test_prefect_still_asks_as_we_answer(name: str) -> None:
    from prefect.server.events.ordering import memory

    assert name in vars(memory.CausalOrdering)
