"""The chat server against hostile requests, clients that leave, and too many of them."""

from tests.support.reliability.server_fuzz import Shot, complaint
from tests.support.reliability.server_load import disconnect, fuzz, overload


def test_no_request_breaks_the_server_or_sees_another():
    fuzz(range(200))


def test_a_stream_is_searched_as_a_whole():
    canary, own = f"canary{1:016x}", f"canary{2:016x}"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    events = [b'data: {"token": "%c", "gpu": 0}\n\n' % letter for letter in canary.encode()]
    stream = head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    shot = Shot(
        pieces=[], canary=own, leaves=False, half_closes=False, must_answer=True, brings=True
    )
    assert complaint(shot, stream, {canary, own}) == f"{canary} of another request came back"
    assert "without its own canary" in str(complaint(shot, stream, {own}))
    assert complaint(shot, b"", {own}) == "no answer"


def test_slots_are_free_after_the_last_disconnect():
    disconnect(range(30))


def test_ten_times_what_it_can_take_is_answered_or_refused_with_retry_after():
    overload(1.0)
