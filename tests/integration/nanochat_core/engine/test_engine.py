import threading
from queue import SimpleQueue

import pytest
import torch

from nanochat_core.engine.engine import Engine
from nanochat_core.engine.reference import generate_naive
from nanochat_core.engine.requests import EndEvent, Request
from nanochat_core.errors import DataError, StageError
from tests.support.nanochat_core.engine.native_models import NO_KERNELS
from tests.support.nanochat_core.engine.scheduler_case import Asked, pages_used
from tests.support.nanochat_core.random_gpt import make_writer

pytestmark = pytest.mark.torch

GREEDY = {"temperature": 0.0, "top_k": None}
WARM = {"temperature": 1.0, "top_k": None}


@pytest.fixture(scope="module")
def engine(make_model, tokenizer):
    return Engine(make_model(), tokenizer)


@pytest.mark.parametrize("max_tokens", [0, 1, 60])
def test_columns_and_batches_are_the_answers_of_complete(engine, max_tokens):
    settings = {"num_samples": 64, "max_tokens": max_tokens, "temperature": 1.5, "top_k": None}
    columns = list(engine.generate([65, 66], seed=5, **settings))
    results, masks = engine.generate_batch([65, 66], seed=5, **settings)
    [answers] = engine.complete([[65, 66]], seeds=[5], **settings)
    assert results == [[65, 66, *answer.ids] for answer in answers]
    assert masks == [[0, 0, *answer.mask] for answer in answers]
    assert len(columns) <= max_tokens
    assert {answer.finished for answer in answers} >= ({True, False} if max_tokens else {False})
    for i, answer in enumerate(answers):
        row, count = [(column[i], mask[i]) for column, mask in columns], len(answer.ids)
        assert row[:count] == list(zip(answer.ids, answer.mask, strict=True))
        assert not engine.ends & {*answer.ids}
        for at, (token, sampled) in enumerate(row[count:]):  # the token that ended it, again
            assert token == row[count][0] in engine.ends
            assert sampled == (at == 0)


@pytest.mark.parametrize("prompt", [[], [65] * 64, [65] * 100])
def test_a_prompt_that_leaves_no_room_is_refused(engine, prompt):
    with pytest.raises(DataError, match="prompt"):
        engine.complete([[65], prompt], num_samples=1, max_tokens=1, seeds=[1, 2], **GREEDY)
    assert engine.scheduler.slots.counts.in_flight == 0
    assert engine.complete([], num_samples=4, max_tokens=9, seeds=[], **WARM) == []


@pytest.mark.parametrize("max_tokens", [6, 9, 10, 30])
def test_a_tool_result_is_forced_with_mask_zero_and_never_cut(make_model, tokenizer, max_tokens):
    engine, special = Engine(make_model(), tokenizer), tokenizer.special
    start, begin, end = map(special, ("<|assistant_start|>", "<|python_start|>", "<|python_end|>"))
    result_end, over = special("<|output_end|>"), special("<|assistant_end|>")
    call = [start, begin, *tokenizer.encode("12*3"), end]
    make_writer(engine.model, call, [result_end, *tokenizer.encode("!"), over])
    prompt = [tokenizer.bos, start]
    settings = {"max_tokens": max_tokens, **GREEDY}
    [[answer, other]] = engine.complete([prompt], num_samples=2, seeds=[0], **settings)
    assert answer == other == generate_naive(engine.model, tokenizer, prompt, seed=0, **settings)
    written = "<|python_start|>12*3<|python_end|><|output_start|>36<|output_end|>!"
    found = tokenizer.decode(answer.ids)
    assert written.startswith(found) == (max_tokens != 9)
    assert ("36" in found) == (max_tokens >= 10)
    assert len(answer.ids) == min(max_tokens, 11)
    if max_tokens >= 10:
        assert answer.mask == [*[1] * 6, *[0] * 4, 1][:max_tokens]
    assert answer.finished == (max_tokens == 30)


def test_its_thread_answers_as_a_callers_and_leaves_the_model_trainable(
    make_model, tokenizer, monkeypatch
):
    used = []

    def use(device):
        used.append((threading.current_thread().name, device))

    monkeypatch.setattr("nanochat_core.engine.engine.use_device", use)
    engine = Engine(make_model(), tokenizer, num_slots=6)
    settings = {"num_samples": 2, "max_tokens": 20, "temperature": 1.0, "top_k": None}

    def ask():
        batch = engine.generate_batch([65] * 20, seed=3, **settings)
        return batch, engine.complete([[65], [66] * 30], seeds=[1, 2], **settings)

    alone = ask()
    engine.start()
    together = ask()
    engine.stop()
    assert alone == together == ask()
    assert used == [("engine", torch.device("cpu"))]
    tokens = torch.tensor([[65, 66, 67]])
    engine.model.token_losses(tokens, tokens).sum().backward()
    assert engine.model.lm_head.weight.grad is not None


def test_stopping_fails_what_is_in_flight_and_the_engine_can_be_used_again(make_model, tokenizer):
    engine = Engine(make_model(), tokenizer)
    model = engine.model
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0  # answers are long
    events = []
    engine.start()
    engine.submit(Request(prompt=[65], sink=events.append, num_samples=200))
    engine.stop()
    ends = [event for event in events if isinstance(event, EndEvent)]
    assert len(ends) == 200
    assert {(end.reason, end.error) for end in ends} <= {
        ("failed", "the engine was stopped"), ("length", ""), ("stop", "")
    }  # fmt: skip
    assert not engine.scheduler.slots.running
    assert not pages_used(engine.scheduler)
    assert engine.generate_batch([65], max_tokens=5)


def test_new_weights_are_loaded_on_request(make_model, tokenizer):
    engine = Engine(make_model(), tokenizer)
    settings = {"num_samples": 2, "max_tokens": 20, "seeds": [3], **WARM}
    before = engine.complete([[65] * 20], **settings)
    engine.model.load_state_dict(make_model(seed=5).state_dict())
    if NO_KERNELS is None:  # their weights are copies; torch's runner reads the model's own
        assert engine.complete([[65] * 20], **settings) == before
    engine.refresh()
    assert engine.complete([[65] * 20], **settings) != before
    expected = Engine(make_model(seed=5), tokenizer).complete([[65] * 20], **settings)
    assert engine.complete([[65] * 20], **settings) == expected


def test_a_generator_that_is_closed_early_gives_slots_and_pages_back(engine):
    columns = engine.generate([65] * 20, num_samples=4)
    for _ in range(3):
        next(columns)
    assert len(engine.scheduler.slots.running) > 1
    columns.close()
    assert not engine.scheduler.slots.running
    assert not pages_used(engine.scheduler)


def test_complete_begins_with_no_page_of_before(make_model, tokenizer):
    engine = Engine(make_model(), tokenizer)
    list(engine.generate([65] * 60, max_tokens=3))
    list(engine.generate([65] * 60, max_tokens=3))
    assert (found := engine.scheduler.slots.counts.prefix_tokens) == 48
    engine.complete([[65] * 60], num_samples=1, max_tokens=3, seeds=[1], **WARM)
    assert engine.scheduler.slots.counts.prefix_tokens == found


def test_the_runner_and_its_memory_are_reported_before_anything_is_asked(make_model, tokenizer):
    output = []
    settings = {"num_slots": 3, "runner": "torch", "on_choice": output.append}
    engine = Engine(make_model(), tokenizer, **settings)
    assert output == []
    engine.scheduler.limit_for([65], None)
    [choice] = output
    assert (choice.runner, choice.reason, choice.num_slots) == ("torch", "asked for", 3)
    assert choice.pool_bytes > 0


# An engine that fails ends every request, and answers the next ones.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_its_thread_has_failed_pending_and_new_requests_fail(make_model, tokenizer):
    engine = Engine(make_model(), tokenizer, runner="torch")
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
    engine = Engine(make_model(), tokenizer, runner="torch")

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
    engine = Engine(make_model(), tokenizer, runner="torch")
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
