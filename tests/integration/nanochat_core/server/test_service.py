"""A server changes its model, ends, and counts what it did."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanochat_core.errors import ConfigError
from nanochat_core.server.api import prompts
from nanochat_core.server.config import ServerConfig
from tests.support.nanochat_core.server.live import (
    PATIENCE,
    fake_pool,
    serving,
    text_of,
    wait_until,
)


def test_a_server_that_stops_notifies_the_streams_of_a_model_that_leaves():
    rules = ServerConfig(log="none", drain_seconds=0.5)
    with ThreadPoolExecutor(1) as threads, serving(rules) as live:
        asked = threads.submit(live.ask, "hold")
        wait_until(lambda: live.running == 1)
        live.run(live.service.swap(lambda: fake_pool("newer")))
        live.server.should_exit = True
        assert asked.result()[-2] == {"error": "the server is being stopped"}


def test_a_request_that_is_being_prepared_when_the_model_changes_is_answered(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    make_chat_prompt = prompts.make_chat_prompt

    def make_slowly(*given, **options):
        begun.set()
        assert go_on.wait(PATIENCE)
        return make_chat_prompt(*given, **options)

    with serving() as live, ThreadPoolExecutor(1) as threads:
        old = live.service.pool
        monkeypatch.setattr(prompts, "make_chat_prompt", make_slowly)
        asked = threads.submit(live.ask, "echo " + "x" * 2500, max_tokens=3)
        assert begun.wait(PATIENCE)
        live.run(live.service.swap(lambda: fake_pool("newer")))
        live.run(asyncio.sleep(0.3))
        go_on.set()
        assert text_of(asked.result()) == "xxx"
        wait_until(lambda: old.workers[0].pid is None)


def test_no_third_model_is_loaded_while_the_first_one_leaves(tmp_path):
    with serving() as live, ThreadPoolExecutor(1) as threads:
        first = live.service.pool
        asked = threads.submit(live.ask, f"hold {tmp_path / 'go'}")
        wait_until(lambda: live.running == 1)
        live.run(live.service.swap(lambda: fake_pool("second")))
        left = []

        def make_third():
            left.append(first.running)
            return fake_pool("third")

        swapping = live.service.swap(make_third)
        third = asyncio.run_coroutine_threadsafe(swapping, live.loop)
        assert live.health()["running"] == 1  # of the first model
        assert "nanochat_running 1.0" in live.get("/metrics").text
        assert live.service.pool.workers[0].spec.directory == "second"
        (tmp_path / "go").touch()
        assert text_of(asked.result()) == "abcdefgh"
        third.result(PATIENCE)
        assert left == [0]
        assert live.service.pool.workers[0].spec.directory == "third"
        assert live.health()["running"] == 0


def test_restarts_are_counted_across_models():
    with serving() as live:
        old = live.service.pool.workers[0]
        os.kill(old.pid or 0, signal.SIGKILL)
        wait_until(lambda: old.restarts == 1 and old.facts is not None)
        live.run(live.service.swap(lambda: fake_pool("newer")))
        wait_until(lambda: old.pid is None)
        assert "nanochat_engine_restarts 1.0" in live.get("/metrics").text


def test_an_answer_ends_once_in_the_counts_however_it_ends():
    with serving(ServerConfig(log="none", max_seconds=0.1)) as live:
        error = {"error": "the answer took longer than 0.1 seconds"}
        assert live.ask("hold")[-2:] == [error, {"done": True}]
        live.service.rules = ServerConfig(log="none")
        live.ask("echo a")
        with live.answering():
            assert live.running == 1
        wait_until(lambda: live.running == 0)
        reasons = ("failed", "stop", "cancelled", "length")
        counts = [live.count("nanochat_answers_total", reason=reason) for reason in reasons]
    assert counts == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"max_waiting": -1}, "max-waiting is -1"),
        ({"max_seconds": float("nan")}, "max-seconds is nan"),
        ({"max_seconds": float("inf")}, "max-seconds is inf"),
        ({"max_seconds": 0.0}, "max-seconds is 0"),
    ],
)
def test_limits_that_no_request_could_meet_are_refused(rules, says):
    with pytest.raises(ConfigError, match=says) as caught:
        ServerConfig(**rules)
    assert caught.value.hint


def test_what_an_engine_says_of_its_failure_is_for_the_log(capfd):
    with serving() as live:
        assert live.ask("fail")[-2] == {"error": "the engine failed"}
    assert "the engine failed: it was asked to" in capfd.readouterr().err
