// A crew of threads that goes through a pass together, phase by phase.
//
// A phase is a number of tickets; the first thread that comes takes the next. The one that finishes
// the last ticket opens the next phase. No thread waits for a thread, only for tickets: one that
// the system has preempted delays the others no longer than the ticket that it holds, which makes
// this fit for a shared machine. If even that delays the caller for long, it continues without the
// others for a while: one thread alone is faster than two that wait for each other's time slices.
// Every thread walks through the same list of phases; one that comes late finds no tickets left and
// catches up.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

class Crew {
 public:
  // One thread's place in the current pass.
  struct Member {
    int index;
    uint64_t phase;  // pass and phase, as in work_ without the ticket
  };

  // `work` is what every thread does in a pass: a sequence of `phase` calls, the same for all.
  Crew(int num_threads, std::function<void(Member&)> work) : work_fn_(std::move(work)) {
    threads_.reserve(std::max(num_threads - 1, 0));
    try {
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (const std::exception&) {
      // The system has no more to give; those that are there do the work.
    }
  }

  ~Crew() {
    closing_.store(true);
    ring();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // One pass; the caller is one of the crew.
  void run() {
    const uint64_t phase = (++pass_ & PASS_MASK) << PHASE_BITS;
    work_.store(phase << TICKET_BITS, std::memory_order_seq_cst);
    const bool together = !threads_.empty() && alone_ == 0;
    if (together) ring();
    held_up_ = 0;
    const uint64_t start = __rdtsc();
    Member member{0, phase};
    work_fn_(member);
    // A phase that no walk reaches: a latecomer may read what the next pass is about to be.
    work_.store((phase | PHASE_MASK) << TICKET_BITS, std::memory_order_seq_cst);
    if (!together) {
      if (alone_ > 0) --alone_;
    } else if (held_up_ * 4 > __rdtsc() - start) {
      alone_ = patience_;
      patience_ = std::min(2 * patience_, MOST_ALONE);
    } else if (patience_ > LEAST_ALONE) {
      --patience_;
    }
  }

  // True where the member is behind the others: what it prepares for this phase is in vain.
  bool is_late(const Member& m) const {
    return work_.load(std::memory_order_acquire) >> TICKET_BITS != m.phase;
  }

  // do_ticket(i) for each i < tickets, all of them done on return. False: the pass is over, and
  // what the member sees may belong to another.
  template <class Do>
  bool phase(Member& m, int tickets, Do do_ticket) {
    if (tickets == 0) return true;
    for (int i; (i = claim(m.phase, tickets)) >= 0;) {
      do_ticket(i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(tickets)) {
        done_.store(0, std::memory_order_relaxed);
        work_.store((m.phase + 1) << TICKET_BITS, std::memory_order_release);
      }
    }
    uint64_t now, since = 0;
    for (int turns = 0; (now = work_.load(std::memory_order_acquire) >> TICKET_BITS) == m.phase;) {
      if (++turns < SPINS_IN_PASS) {
        _mm_pause();
        continue;
      }
      if (since == 0) since = __rdtsc();
      sched_yield();
    }
    if (since != 0 && m.index == 0) held_up_ += __rdtsc() - since;
    if (now >> PHASE_BITS != m.phase >> PHASE_BITS) return false;
    ++m.phase;
    return true;
  }

 private:
  static constexpr int TICKET_BITS = 24, PHASE_BITS = 16;
  static constexpr uint64_t PASS_MASK = (1u << 24) - 1, PHASE_MASK = (1u << PHASE_BITS) - 1;
  static constexpr uint64_t TICKET_MASK = (1u << TICKET_BITS) - 1;
  static constexpr int SPINS_IN_PASS = 400, SPINS_BETWEEN = 2000;  // 10 and 50 us or so
  static constexpr int LEAST_ALONE = 8, MOST_ALONE = 1024;         // passes

  int claim(uint64_t phase, int tickets) {
    uint64_t now = work_.load(std::memory_order_acquire);
    do {
      if (now >> TICKET_BITS != phase || static_cast<int>(now & TICKET_MASK) >= tickets) return -1;
    } while (!work_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return static_cast<int>(now & TICKET_MASK);
  }

  void ring() {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, threads_.size(), nullptr, nullptr, 0);
  }

  void serve(int index) {
    uint32_t heard = 0;
    while (true) {
      uint32_t now;
      for (int turns = 0; (now = bell_.load(std::memory_order_acquire)) == heard; ++turns) {
        if (turns < SPINS_BETWEEN) {
          _mm_pause();
          continue;
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      heard = now;
      if (closing_.load()) return;
      // Phase 0 of whichever pass it is by now: of one that is further on there is nothing to do.
      const uint64_t pass = work_.load(std::memory_order_acquire) >> (TICKET_BITS + PHASE_BITS);
      Member member{index, pass << PHASE_BITS};
      work_fn_(member);
    }
  }

  alignas(64) std::atomic<uint64_t> work_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  uint64_t pass_ = 0;
  // The caller's: time it waited in this pass, passes to do alone, and how many the next time.
  uint64_t held_up_ = 0;
  int alone_ = 0, patience_ = LEAST_ALONE;
  std::function<void(Member&)> work_fn_;
  std::vector<std::thread> threads_;
};
