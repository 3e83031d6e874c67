"""The kernels for a CPU, beyond the contract of all runners.

They sample as sampling.py does from any logits, leave nothing behind, refuse what they would not
survive, and do with the threads and the memory that there are.
"""

import dataclasses
import errno
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanochat_core.engine import speed
from nanochat_core.engine.native import build, weights
from nanochat_core.engine.native.memory import Arena
from nanochat_core.engine.native.weights import FORMS
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import row_key, sample
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.runtime.hardware.cpp_library import find_compiler
from tests.integration.nanochat_core.engine.test_runner_contract import DRAW, PROMPTS, answer, begin
from tests.support.nanochat_core.engine.native_models import (
    LENGTH,
    VOCAB,
    chunk,
    make_gpt,
    make_runner,
    make_tokens,
    needs_kernels,
    read,
)

pytestmark = [pytest.mark.torch, needs_kernels]


def native_sample(logits, params, seed, position):
    """One token for each row of logits (n, V), whose sample is the row's index."""
    runner = make_runner(make_gpt({"vocab_size": logits.size(1)}), num_slots=len(logits))
    for slot in range(len(logits)):
        runner.start(slot, params, key=row_key(seed, slot), num_log_probs=None)
    at = [position] * len(logits)
    return runner.sample_first(range(len(logits)), logits, at, at).tokens[0]


@pytest.mark.parametrize("seed", [0, -5, 2**62])
@pytest.mark.parametrize("top_k", [None, 1, 7, 99, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 0.01, 0.8, 3.0])
def test_equal_logits_give_equal_tokens(temperature, top_k, seed):
    logits = 4 * torch.randn((200, VOCAB), generator=torch.Generator().manual_seed(5))
    keys = torch.tensor([row_key(seed, slot) for slot in range(200)])
    top_p = 0.9 if 0 < temperature < 0.01 and top_k is None else 1.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = sample(logits, keys, torch.full((200,), 12), params).tolist()
    found = native_sample(logits, params, seed, 12)
    # The last bit of a sum may decide between two neighbours: once in a hundred thousand.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
    if temperature < 0.01:
        assert found == expected == logits.argmax(dim=-1).tolist()


def test_saturated_logits_are_distinguished_as_after_the_softcap():
    model = make_gpt()
    with torch.no_grad():
        model.lm_head.weight.mul_(200)  # most logits round to the cap
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=5)):
        runner = make_runner(model)
        found = answer(runner, 1, params, 12)
        tokens = PROMPTS[1] + found
        logits = read(make_runner(model), 0, tokens[:-1], *range(40, len(tokens) - 1))
        again = make_runner(model)
        for step, row in enumerate(logits):
            again.start(2, params, key=row_key(7, 1), num_log_probs=None)
            output = again.sample_first([2], row[None], [40 + step], [0]).tokens[0][0]
            assert output == found[step]


def test_runners_that_are_gone_leave_no_thread_and_no_memory():
    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    model = make_gpt()
    begin(make_runner(model, num_threads=3), 0, DRAW)
    gc.collect()
    before = count()
    for _ in range(20):
        begin(make_runner(model, num_threads=3), 0, DRAW)
    gc.collect()
    # Threads of earlier tests in this process may end meanwhile; 20 leaks would be 40 threads.
    assert count() < before + 20
    mapped = Path("/proc/self/maps").read_text()
    make_runner(model)
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= len(mapped.splitlines()) + 2


def test_what_the_kernels_would_not_survive_is_stopped_before():
    runner = make_runner(make_gpt())
    for first, pages in ((5, [1, 2]), (-1, [1]), (0, [10**6]), (0, [-1])):
        with pytest.raises(AssertionError, match=r"entries|pages"):
            runner.set_table(0, 0, first, pages)
    with pytest.raises(AssertionError, match="tokens of"):
        runner.decode([0], [LENGTH + 2], 1)
    for token in (-1, 100):
        with pytest.raises(AssertionError, match="token"):
            runner.prefill([chunk(0, [3, token], 0, 2)])


def test_of_equal_tokens_the_lowest_is_likeliest_and_an_odd_top_k_leaves_all():
    greedy, logits = SamplingParams(temperature=0.0), torch.zeros((1, VOCAB))
    for first in (0, 64):
        logits[0, first:] = float(first)
        assert native_sample(logits, greedy, 1, 1) == [first]
    logits = torch.randn((50, VOCAB), generator=torch.Generator().manual_seed(5))
    found = [native_sample(logits, SamplingParams(top_k=k), 1, 1) for k in (None, 0, -3, 10**15)]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("vocab", [33, 47, 48, 100])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_logits_that_are_no_numbers_do_no_harm(vocab, value):
    every, one = torch.full((2, vocab), value), torch.zeros(2, vocab)
    one[:, 5] = value
    for params in (SamplingParams(temperature=0.0), DRAW, SamplingParams(temperature=1.0)):
        for logits in (every, one):
            tokens = native_sample(logits, params, 1, 1)
            assert all(0 <= token < vocab for token in tokens)
            if logits is one:
                assert all((token == 5) == (value > 0) for token in tokens)


# Of logits, beyond the contract of all runners.

TOKENS = make_tokens(LENGTH, 7)


@pytest.mark.parametrize("precision", FORMS)
def test_the_number_of_threads_changes_no_bit(precision):
    model = make_gpt({"width": 128})
    runners = [make_runner(model, precision=precision, num_threads=n) for n in (1, 3)]
    for count, cuts in ((1, ()), (3, (40,)), (4, (1, 16, 32))):
        one, three = (read(runner, count - 1, TOKENS, *cuts) for runner in runners)
        assert torch.equal(one, three)
    found = []
    for runner in runners:
        for slot in range(4):
            runner.start(slot, SamplingParams(), key=row_key(slot, 3), num_log_probs=None)
            logits = read(runner, slot, TOKENS[: 5 + 20 * slot])
            runner.sample_first([slot], logits, [5 + 20 * slot], [TOKENS[4 + 20 * slot]])
        found.append(
            [
                runner.decode(slots, [LENGTH] * len(slots), 5)().tokens
                for slots in ([0, 1, 2, 3], [3, 1], [2])
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", FORMS)
def test_what_an_earlier_request_left_in_a_page_is_never_read(precision):
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    clean = read(runner, 0, TOKENS, 40)
    for pool in runner._pools:
        pool.fill_(0xFF)  # a NaN in every form
    assert torch.equal(read(runner, 0, TOKENS, 40), clean)


@pytest.mark.parametrize(
    "name", ["lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_q"]
)
def test_a_nan_among_the_weights_is_one_where_torch_has_one(name):
    model = make_gpt()
    model.get_parameter(f"{name}.weight").data[5, 0] = torch.nan
    logits = read(make_runner(model), 0, TOKENS)
    assert logits.isnan().any()
    with torch.no_grad():
        assert torch.equal(logits.isnan(), model(torch.tensor([TOKENS]))[0, -1:].isnan())


SPOILT = {
    "smear reads beyond its gate": lambda r: setattr(r._spec, "smear_channels", 25),
    "smear reads beyond the width": lambda r: setattr(r._spec, "smear_channels", 65),
    "more tokens than rows": lambda r: setattr(r._spec, "vocab", 10_000),
    "more layers than matrices": lambda r: setattr(r._spec.layers[1].qkv, "panels", 1),
    "deeper matrices": lambda r: setattr(r._spec.layers[2].mlp_out, "steps", 10**6),
    "no matrix": lambda r: setattr(r._spec.layers[0].fc, "data", None),
    "heads that share no key": lambda r: setattr(r._spec, "num_kv_heads", 3),
    "wider heads": lambda r: setattr(r._spec, "head_width", 64),
    "negative width": lambda r: setattr(r._spec, "width", -64),
    "longer texts": lambda r: setattr(r._spec, "table_width", 10**6),
    "more slots": lambda r: setattr(r._spec, "num_slots", 10**6),
    "a group too many": lambda r: setattr(r._spec.layers[0], "group", 2),
    "a layer beyond its page": lambda r: setattr(r._spec.layers[0], "index", 3),
    "a negative window": lambda r: setattr(r._spec.layers[0], "window", -1),
    "a middle beyond the last": lambda r: setattr(r._spec, "middle_layer", 4),
    "an unknown form": lambda r: setattr(r._spec, "form", 3),
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_kernels_refuse_counts_that_do_not_fit(name, precision):
    runner = make_runner(make_gpt(), precision=precision, num_threads=1)
    SPOILT[name](runner)
    with pytest.raises(ModelError, match="the kernels refuse them"):
        runner._open()


def test_parameters_of_another_shape_or_dtype_are_refused_before_they_are_packed():
    for name, made in (
        ("smear_gate.weight", torch.zeros(1, 8)),
        ("resid_lambdas", torch.zeros(3)),
        ("lm_head.weight", torch.zeros(128, 64, dtype=torch.float64)),
    ):
        model = make_gpt()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(made))
        with pytest.raises(ModelError, match=name):
            weights.check_parameters(model)


def test_a_gate_reads_no_more_channels_than_there_are():
    model = make_gpt()
    for name in ("smear_channels", "gate_channels"):
        numerics = dataclasses.replace(model.numerics, **{name: 65})
        with pytest.raises(ConfigError, match=f"numerics.{name} 65 is more than model.width 64"):
            type(model)(model.config, numerics)


# A process of its own: who may not have more address space cannot run tests.
LIMITED = """
import resource
from pathlib import Path
from nanochat_core.engine.native.runner import NativeRunner
import tests.support.nanochat_core.engine.native_models as models

open_engine = NativeRunner._open

def open_limited(self):
    self._spec.max_rows = max_rows
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, -1))
    return open_engine(self)

def answer(runner):
    return models.read(runner, 0, models.make_tokens(40, 1)).sum().item()

print(answer(models.make_runner(models.make_gpt(), num_threads=1)))
NativeRunner._open = open_limited
for num_threads, max_rows in ((65, 256), (1, 2**20)):  # 64 stacks are more than there may be
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    try:
        runner = models.make_runner(models.make_gpt(), num_threads=num_threads)
    except MemoryError as error:
        print(error)
    else:
        print(answer(runner))
        print(len(list(Path("/proc/self/task").iterdir())))
"""


def test_fewer_threads_give_the_same_answer_and_too_large_buffers_an_error_and_no_crash():
    found = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, (found.returncode, found.stderr)
    alone, crowd, threads, too_large = found.stdout.splitlines()
    assert crowd == alone
    assert int(threads) < 64
    assert too_large == "the kernels' buffers do not fit into memory"


def test_the_bandwidth_of_the_memory_is_measured(monkeypatch):
    monkeypatch.setattr(speed, "PROBE_BYTES", 2**22)
    monkeypatch.setattr(speed, "PROBE_SECONDS", 0.02)
    assert speed.read_bandwidth(torch.device("cpu"), threads=3) > 0


def test_where_the_system_has_no_large_pages_memory_lies_on_small_ones(monkeypatch):
    class SmallPages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert Arena().zeros((3, 5), torch.float32).fill_(2).sum() == 30


# The helper sleeps in its ticket in ten passes, as if it had been preempted. Then nothing delays
# it, and it prints after how many passes of a millisecond's work the helper does a ticket again.
PROGRAM = """
#include "kernels_threads.h"

#include <cstdio>
#include <ctime>

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main() {
  int delays = 0, passes = 0;
  std::atomic<int> helped{0};
  bool is_delayed = true;
  Crew* self = nullptr;
  Crew crew(2, [&](Crew::Member& m) {
    self->phase(m, is_delayed ? 2 : 50, [&](int) {
      if (m.index == 1) {
        ++helped;
        if (is_delayed) usleep(10'000);
      } else if (!is_delayed) {
        for (const double end = cpu_seconds() + 20e-6; cpu_seconds() < end;) continue;
      } else {
        for (int i = 0; i < 100 && !helped.load(); ++i) _mm_pause();
      }
    });
  });
  self = &crew;
  while (delays < 10) {
    helped = 0;
    crew.run();
    delays += helped > 0;
  }
  is_delayed = false;
  helped = 0;
  while (helped == 0) {
    crew.run();
    ++passes;
  }
  printf("%d\\n", passes);
}
"""


def test_threads_that_were_delayed_help_again_within_some_passes(tmp_path):
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    compiler = find_compiler()
    include = f"-I{build.LIBRARY.folder}"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-pthread", include, source, "-o", program], check=True
    )

    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=120)

    assert int(done.stdout) < 3000
