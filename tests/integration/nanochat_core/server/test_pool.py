import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat_core.engine.requests import EndEvent, TokenEvent
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.server.api import prompts
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.launch import Engines
from nanochat_core.server.serve import Newer, follow_newer, serve
from nanochat_core.server.workers.ipc import frame
from nanochat_core.server.workers.pool import ENGINE_PROCESS, AnswerStream, HangTimeouts, Worker
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.live import (
    FAKE,
    PATIENCE,
    fake_pool,
    serving,
    text_of,
    wait_until,
)


def test_a_cancelled_stream_ends_at_once_and_hears_no_more():
    called = []
    stream = AnswerStream(2, worker=0, on_cancel=lambda: called.append(1))
    stream.put(EndEvent(sample=0, reason="stop"))
    stream.cancel()
    stream.cancel()
    stream.put(TokenEvent(sample=1, token=5, sampled=True, log_probs=None))
    events = asyncio.run(stream.take())
    assert [(event.sample, event.reason) for event in events] == [(0, "stop"), (1, "cancelled")]
    assert called == [1]


def test_an_engine_that_dies_fails_its_streams_only_and_comes_back(tmp_path):
    with serving(workers=2) as live, ThreadPoolExecutor(2) as threads:
        asks = [threads.submit(live.ask, f"hold {tmp_path / 'go'}") for _ in range(2)]
        # Each goes where least is under way.
        wait_until(lambda: [w.busy for w in live.service.pool.workers] == [1, 1])
        victim = live.service.pool.workers[0]
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: victim.restarts == 1)
        assert live.health()["ready"]
        (tmp_path / "go").touch()
        failed, whole = sorted((ask.result() for ask in asks), key=lambda one: "usage" in one[-2])
        assert failed[-2] == {"error": "the engine stopped unexpectedly; try again in a moment"}
        assert whole[-2]["usage"]["finish_reason"] == "stop"
        assert {event["gpu"] for event in whole if "gpu" in event} == {1}
        wait_until(lambda: victim.facts is not None)
        assert text_of(live.ask("echo again")) == "again"


def test_while_the_only_engine_is_away_requests_get_503(monkeypatch, caplog):
    is_refused = True
    popen = subprocess.Popen

    def refuse_first(*given, **options):
        if is_refused:
            raise BlockingIOError(11, "resource temporarily unavailable")
        return popen(*given, **options)

    with serving() as live:
        worker = live.service.pool.workers[0]
        monkeypatch.setattr(subprocess, "Popen", refuse_first)
        assert "error" in live.ask("die")[-2]
        wait_until(lambda: worker.restarts == 2)
        health, refused = live.health(), live.post()
        assert (health["status"], health["ready"]) == ("starting", False)
        assert refused.status_code == 503
        is_refused = False
        wait_until(lambda: live.health()["ready"])
        assert text_of(live.ask("echo back")) == "back"
    assert "cannot be started: [Errno 11] resource temporarily unavailable" in caplog.text


def test_a_pool_whose_process_cannot_be_started_says_so(live, monkeypatch):
    def refuse(*given, **options):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    sockets = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match=r"cannot be started: .* too many open files"):
        live.run(fake_pool().start())
    assert len(os.listdir("/proc/self/fd")) == sockets


def test_an_engine_that_hangs_is_killed_and_comes_back(caplog):
    timeouts = HangTimeouts(cancel_seconds=0.3)
    with serving(timeouts=timeouts) as live, ThreadPoolExecutor(1) as threads:
        worker = live.service.pool.workers[0]
        company = threads.submit(live.ask, "hold")
        wait_until(lambda: live.running == 1)
        hung = worker.pid
        with live.answering():
            os.kill(hung, signal.SIGSTOP)
        assert "stopped unexpectedly" in company.result()[-2]["error"]
        wait_until(lambda: live.health()["ready"])
        assert worker.pid != hung
        assert text_of(live.ask("echo back")) == "back"
    assert "the engine hangs: it did not end a cancelled answer within 0.3 seconds" in caplog.text


def test_an_engine_that_ends_what_is_cancelled_is_left_alone(monkeypatch):
    check, checked = Worker._check_ended, []

    def check_when_it_has_ended(worker, number):
        if worker.busy:
            live.loop.call_later(0.01, check_when_it_has_ended, worker, number)
        else:
            checked.append(check(worker, number))

    monkeypatch.setattr(Worker, "_check_ended", check_when_it_has_ended)
    with serving(timeouts=HangTimeouts(cancel_seconds=0.3)) as live:
        with live.answering():
            pass
        wait_until(lambda: checked != [])
        assert text_of(live.ask("echo still")) == "still"
        assert live.service.pool.workers[0].restarts == 0


def test_an_engine_that_is_never_ready_is_given_up(live):
    pool = fake_pool("never", timeouts=HangTimeouts(load_seconds=0.5))
    with pytest.raises(ModelError, match=r"hangs: it was not ready within 0.5 seconds"):
        live.run(pool.start())
    assert pool.workers[0].pid is None


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_engine_without_a_request_ends_with_the_http_process(is_ready):
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", ENGINE_PROCESS, str(descriptor)]
    with ours, theirs, subprocess.Popen(command, pass_fds=[descriptor]) as process:
        spec = fake_pool("fake" if is_ready else "never").workers[0].spec
        ours.sendall(frame(dataclasses.asdict(spec)))
        if is_ready:
            ours.recv(1, socket.MSG_PEEK)  # it stays unread, which resets the connection
        ours.close()
        try:
            assert process.wait(timeout=PATIENCE) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("directory", "says"),
    [
        ("broken", "this model is broken"),
        ("crash", "the engine ended at once: exit status 9"),
        ("segfault", "the engine ended at once: killed by SIGSEGV"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_at_the_start(live, directory, says):
    with pytest.raises(ModelError, match=says) as caught:
        live.run(fake_pool(directory).start())
    assert caught.value.hint


def test_a_server_whose_engine_ends_again_and_again_without_an_answer_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat_core.server.workers.pool.FIRST_PAUSE", 0.01)
    directory = tmp_path / "brief"
    (directory / "tokenizer").mkdir(parents=True)
    TOKENIZER.save(directory / "tokenizer")
    (directory / "config.json").touch()
    engines = Engines(device="cpu", maker=FAKE)
    with pytest.raises(ModelError, match="ended 6 times without one answer: exit status 9") as why:
        serve(directory, name="x", host="127.0.0.1", port=0, engines=engines, rules=ServerConfig())
    assert why.value.hint


def test_an_engine_that_answers_between_its_ends_is_started_for_ever(monkeypatch):
    monkeypatch.setattr("nanochat_core.server.workers.pool.MAX_VAIN_LIVES", 2)
    with serving() as live:
        worker = live.service.pool.workers[0]
        for count in range(1, 4):
            assert text_of(live.ask("echo one")) == "one"
            live.ask("die")
            wait_until(lambda count=count: worker.restarts == count and worker.facts is not None)
        assert live.service.pool.failure is None


@pytest.mark.parametrize(
    ("coming", "tried", "says"),
    [
        (["fake", "broken", "newer"], ["broken", "newer"], "the model stays: this model is broken"),
        (["fake", OSError("no store"), "newer"], ["newer"], "OSError: no store"),
        (["newer", "newer"], ["newer", "newer"], "the model stays: not now"),
    ],
)
def test_whatever_is_newer_is_served_whatever_failed_before(caplog, coming, tried, says):
    answers, made = list(coming), []

    def find():
        found = answers.pop(0) if answers else coming[-1]
        if isinstance(found, Exception):
            raise found
        return Path(found)

    def pool_of(found):
        made.append(str(found))
        if made == ["newer"] and tried == ["newer", "newer"]:  # the first try of two
            raise ModelError("not now")
        return fake_pool(str(found))

    async def follow(service):
        async with asyncio.timeout(PATIENCE):
            newer = Newer(find=find, every_seconds=0.05)
            following = follow_newer(service, newer, pool_of, served=Path("fake"))
            task = asyncio.create_task(following)
            while service.pool is old:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            task.cancel()

    with serving() as live:
        old = live.service.pool
        live.run(follow(live.service))
        assert live.service.pool.workers[0].spec.directory == "newer"
        assert text_of(live.ask("echo new")) == "new"
    assert says in caplog.text
    assert made == tried


def test_a_stop_that_is_cancelled_leaves_no_process_behind():
    async def stop_twice():
        pool = fake_pool()
        await pool.start()
        process = pool.workers[0]._process
        first = asyncio.create_task(pool.stop())
        await asyncio.sleep(0.001)  # its process is being waited for
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await pool.stop()
        return process.returncode

    assert asyncio.run(stop_twice()) is not None


# A server changes its model, ends, and counts what it did.


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


def test_another_model_drops_no_stream_and_no_third_is_loaded_while_the_first_leaves(tmp_path):
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
        assert text_of(live.ask("echo new")) == "new"
        (tmp_path / "go").touch()
        assert text_of(asked.result()) == "abcdefgh"
        third.result(PATIENCE)
        assert left == [0]
        assert first.workers[0].pid is None
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
