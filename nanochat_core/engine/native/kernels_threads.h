// A crew of threads that goes through a pass together, phase by phase.
//
// A phase is a number of tickets; the first thread that comes takes the next. The one that finishes
// the last ticket opens the next phase. No thread waits for a thread, only for tickets: one that
// the system has preempted delays the others no longer than the ticket that it holds, which makes
// this fit for a shared machine. If the caller waits so long that it would be faster alone, it
// continues without the others for some milliseconds: beside many busy programs one thread alone is
// faster than two that wait for each other's time slices.
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
#include <chrono>
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
    const auto start = Clock::now();
    const bool together = !threads_.empty() && start >= alone_until_;
    if (together) ring();
    Member member{0, phase};
    work_fn_(member);
    // A phase that no walk reaches: a latecomer may read what the next pass is about to be.
    work_.store((phase | PHASE_MASK) << TICKET_BITS, std::memory_order_seq_cst);
    if (together) evaluate(start, Clock::now());
    else waited_ = {};  // for a latecomer from an earlier pass
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
    uint64_t now;
    Clock::time_point since{};
    for (int turns = 0; (now = work_.load(std::memory_order_acquire) >> TICKET_BITS) == m.phase;) {
      if (++turns < SPINS_IN_PASS) {
        _mm_pause();
        continue;
      }
      if (since == Clock::time_point{}) since = Clock::now();
      sched_yield();
    }
    if (since != Clock::time_point{} && m.index == 0) waited_ += Clock::now() - since;
    if (now >> PHASE_BITS != m.phase >> PHASE_BITS) return false;
    ++m.phase;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int TICKET_BITS = 24, PHASE_BITS = 16;
  static constexpr uint64_t PASS_MASK = (1u << 24) - 1, PHASE_MASK = (1u << PHASE_BITS) - 1;
  static constexpr uint64_t TICKET_MASK = (1u << TICKET_BITS) - 1;
  static constexpr int SPINS_IN_PASS = 400, SPINS_BETWEEN = 2000;  // 10 and 50 us or so
  // Passes together are evaluated over a window, since one delay is many short passes long.
  static constexpr Clock::duration WINDOW = std::chrono::milliseconds(5);
  static constexpr Clock::duration MIN_ALONE = std::chrono::milliseconds(5);
  static constexpr Clock::duration MAX_ALONE = std::chrono::milliseconds(40);

  int claim(uint64_t phase, int tickets) {
    uint64_t now = work_.load(std::memory_order_acquire);
    do {
      if (now >> TICKET_BITS != phase || static_cast<int>(now & TICKET_MASK) >= tickets) return -1;
    } while (!work_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    return static_cast<int>(now & TICKET_MASK);
  }

  // After a pass together: go alone for a while if the waits cost more than the others' help was
  // worth. What all threads do while the caller does not wait takes it alone size() times as long.
  void evaluate(Clock::time_point start, Clock::time_point end) {
    together_ += end - start;
    if (together_ < WINDOW) return;
    if ((together_ - waited_) * size() < together_) {
      alone_until_ = end + alone_for_;
      alone_for_ = std::min(2 * alone_for_, MAX_ALONE);
    } else {
      alone_for_ = MIN_ALONE;
    }
    together_ = waited_ = {};
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
  // The caller's: its passes in this window and its waits in them; when the others help again.
  Clock::duration together_{}, waited_{}, alone_for_ = MIN_ALONE;
  Clock::time_point alone_until_{};
  std::function<void(Member&)> work_fn_;
  std::vector<std::thread> threads_;
};
