"""The threads of the kernels beside a program that delays them."""

import subprocess

import pytest

from nanochat_core.engine.native import build
from nanochat_core.runtime.hardware.cpp_library import find_compiler

REASON = build.unable_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")

WORDS = ("-std=c++17", "-O1", "-pthread")

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
    subprocess.run([compiler, *WORDS, include, source, "-o", program], check=True)

    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=120)

    assert int(done.stdout) < 3000
