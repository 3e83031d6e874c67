// What training computes on a CPU with kernels of its own.
#include "loss.h"
#include "products.h"

#include <thread>
#include <vector>

// Runs part(index, first, end) for each thread's share of 0..count, in multiples of `unit`.
template <class Part>
static void share(int threads, int64_t count, int64_t unit, Part part) {
  const int64_t units = (count + unit - 1) / unit;
  std::vector<std::thread> others;
  for (int t = threads; t-- > 0;) {
    const int64_t first = units * t / threads * unit;
    const int64_t end = std::min(count, units * (t + 1) / threads * unit);
    if (first >= end) continue;
    if (t == 0)
      part(t, first, end);
    else
      others.emplace_back(part, t, first, end);
  }
  for (auto& other : others) other.join();
}

extern "C" {

// Floats of scratch memory that each thread needs.
int64_t nf_work() { return WORK; }

// C = A B; the longer side of C is divided among the threads.
void nf_multiply(int threads, int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row,
                 int64_t a_col, const float* b, int64_t b_row, int64_t b_col, float* c, float* work) {
  const View left{a, a_row, a_col}, right{b, b_row, b_col};
  if (m >= n)
    share(threads, m, MR, [=](int t, int64_t first, int64_t end) {
      multiply(end - first, n, depth, left.at(first, 0), right, c + first * n, n, false,
               work + t * WORK);
    });
  else
    share(threads, n, NR, [=](int t, int64_t first, int64_t end) {
      multiply(m, end - first, depth, left, right.at(0, first), c + first, n, false,
               work + t * WORK);
    });
}

// Floats of scratch memory for the loss.
int64_t nf_loss_work(int threads, int64_t width, int64_t vocab, int gradients) {
  return Loss::work_of(width) * threads + ROWS * (gradients ? vocab + width : COLS);
}

void nf_loss(int threads, int64_t tokens, int64_t width, int64_t vocab, const float* hidden,
             const float* weight, const int64_t* targets, const float* scale, float cap,
             float* losses, float* grad_hidden, float* grad_weight, float* work) {
  const int64_t each = Loss::work_of(width);
  float* scaled = work + each * threads;
  const Loss loss{tokens, width,       vocab,       hidden, weight, targets, scale, cap,
                  losses, grad_hidden, grad_weight, scaled + (scale ? ROWS * width : 0), scaled};
  for (int64_t block = 0; block < tokens; block += ROWS) {
    share(threads, std::min<int64_t>(ROWS, tokens - block), NR,
          [=](int t, int64_t first, int64_t end) {
            loss.read(block, block + first, block + end, work + t * each);
          });
    if (scale)
      share(threads, vocab, MC, [=](int t, int64_t first, int64_t end) {
        loss.add_words(block, first, end, work + t * each);
      });
  }
}
}
