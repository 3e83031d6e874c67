"""An engine that fails ends every request, and answers the next ones."""

from queue import SimpleQueue

import pytest
import torch

from nanochat_core.engine.requests import Request
from nanochat_core.errors import StageError
from tests.support.nanochat_core.engine.engine_case import engine_on
from tests.support.nanochat_core.engine.scheduler_case import Asked

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_its_thread_has_failed_pending_and_new_requests_fail(make_model, tokenizer):
    engine = engine_on("torch", make_model(), tokenizer)
    scheduler, asked = engine.scheduler, Asked()
    step, fail_all = scheduler.step, scheduler.fail_all

    def fail():
        raise ZeroDivisionError("a bug")

    def abandon_and_be_asked(*of):
        """Submit a request after the others have failed and before the engine knows it."""
        fail_all(*of)
        scheduler.fail_all = fail_all
        scheduler.submit(Request(prompt=[65], sink=asked.take))

    scheduler.step, scheduler.fail_all = fail, abandon_and_be_asked
    engine.start()
    engine._thread.join(120)
    assert asked.ends[0].reason == "failed"
    with pytest.raises(RuntimeError, match="thread has failed") as output:
        engine._next(SimpleQueue())
    assert isinstance(output.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="thread has failed"):
        engine.generate_batch([65], max_tokens=3)
    scheduler.step = step
    engine.stop()
    assert engine.generate_batch([65], max_tokens=3)


def test_a_lack_of_memory_for_answers_is_not_one_of_a_device_batch(
    make_model, tokenizer, monkeypatch
):
    engine = engine_on("torch", make_model(), tokenizer)

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    asked = {"num_samples": 2, "max_tokens": 3, "temperature": 1.0, "top_k": None, "seeds": [1]}
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.runner, "prefill", no_room)
        with pytest.raises(StageError, match=r"while sampling answers: .* 2.00 GiB\.$") as caught:
            engine.complete([[65]], **asked)
    assert type(caught.value) is StageError  # OutOfMemory would be tried with a smaller batch
    assert "the device batch size does not change it" in str(caught.value.hint)
    assert engine.complete([[65]], **asked)


def test_what_failed_once_is_not_raised_for_a_later_failure(make_model, tokenizer, monkeypatch):
    engine = engine_on("torch", make_model(), tokenizer)
    runner = engine.scheduler.runner

    def fail(*_):
        raise MemoryError("too little")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "prefill", fail)
        with pytest.raises(MemoryError):
            engine.generate_batch([65], max_tokens=3)
    columns = engine.generate([65], max_tokens=30)
    next(columns)
    engine.scheduler.fail_all("the engine was stopped")
    with pytest.raises(RuntimeError, match="the engine was stopped"):
        list(columns)
