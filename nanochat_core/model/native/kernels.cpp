// What training computes on a CPU with kernels of its own.
#include "loss.h"
#include "products.h"
#include "rows.h"

#include <system_error>
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
    try {
      if (t > 0) {
        others.emplace_back(part, t, first, end);
        continue;
      }
    } catch (const std::system_error&) {
      // The system has no thread to give: the caller does its work.
    }
    part(t, first, end);
  }
  for (auto& other : others) other.join();
}

// Runs row(i) for each of `rows` rows of `width` floats; few floats are not worth a second thread.
template <class Row>
static void share_rows(int threads, int64_t rows, int64_t width, Row row) {
  share(rows * width < 1 << 17 ? 1 : threads, rows, 1, [=](int, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) row(i);
  });
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

// `slopes` of bf16 logits z (words, tokens), in place; total (tokens): of each token over all words.
void nf_slopes(int threads, int64_t words, int64_t tokens, uint16_t* z, float cap, float* total) {
  share(threads, tokens, NR, [=](int, int64_t first, int64_t end) {
    std::vector<float> sums(end - first);
    std::vector<double> whole(end - first);
    for (int64_t word = 0; word < words; ++word) {
      slopes(z + word * tokens + first, sums.data(), end - first, cap);
      if ((word + 1) % COLS && word + 1 < words) continue;
      for (int64_t i = 0; i < end - first; ++i) whole[i] += sums[i];
      std::fill(sums.begin(), sums.end(), 0.0f);
    }
    std::copy(whole.begin(), whole.end(), total + first);
  });
}

// x, y (rows, width); factors (rows): see rows.h.
void nf_normalise(int threads, int64_t rows, int64_t width, const float* x, float eps, float* y,
                  float* factors) {
  share_rows(threads, rows, width, [=](int64_t i) {
    factors[i] = normalise(x + i * width, width, eps, 1.0f, y + i * width);
  });
}

void nf_normalise_grad(int threads, int64_t rows, int64_t width, const float* y, const float* grad,
                       const float* factors, float* to) {
  share_rows(threads, rows, width, [=](int64_t i) {
    const int64_t at = i * width;
    normalise_grad(y + at, grad + at, width, factors[i], 1.0f, to + at);
  });
}

// x, y (rows, tokens, heads, width); cos, sin (tokens, width / 2); factors (rows, tokens, heads).
void nf_rotate_normalise(int threads, int64_t rows, int64_t tokens, int64_t heads, int64_t width,
                         const float* x, const float* cos, const float* sin, float eps, float scale,
                         float* y, float* factors) {
  const int64_t half = width / 2;
  share_rows(threads, rows * tokens, heads * width, [=](int64_t i) {
    const int64_t table = i % tokens * half;
    for (int64_t j = i * heads; j < (i + 1) * heads; ++j) {
      float* to = y + j * width;
      rotate(x + j * width, cos + table, sin + table, half, to);
      factors[j] = normalise(to, width, eps, scale, to);
    }
  });
}

// grad: of y, its elements of a head side by side, other strides as given.
void nf_rotate_normalise_grad(int threads, int64_t rows, int64_t tokens, int64_t heads,
                              int64_t width, const float* y, const float* cos, const float* sin,
                              float scale, const float* factors, const float* grad,
                              int64_t grad_row, int64_t grad_token, int64_t grad_head, float* to) {
  const int64_t half = width / 2;
  share_rows(threads, rows * tokens, heads * width, [=](int64_t i) {
    const int64_t token = i % tokens;
    const float* of_token = grad + i / tokens * grad_row + token * grad_token;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t j = i * heads + head;
      normalise_grad(y + j * width, of_token + head * grad_head, width, factors[j], scale,
                     to + j * width);
      rotate_back(to + j * width, cos + token * half, sin + token * half, half);
    }
  });
}

// y = relu(x)^2, and the gradient of x.
void nf_relu_square(int threads, int64_t rows, int64_t width, const float* x, float* y) {
  share_rows(threads, rows, width,
             [=](int64_t i) { relu_square(x + i * width, width, y + i * width); });
}

void nf_relu_square_grad(int threads, int64_t rows, int64_t width, const float* x,
                         const float* grad, float* to) {
  share_rows(threads, rows, width, [=](int64_t i) {
    relu_square_grad(x + i * width, grad + i * width, width, to + i * width);
  });
}

// y = a x + b first, all (rows, width).
void nf_mix(int threads, int64_t rows, int64_t width, const float* x, const float* first, float a,
            float b, float* y) {
  share_rows(threads, rows, width, [=](int64_t i) {
    for (int64_t j = i * width; j < (i + 1) * width; ++j) y[j] = a * x[j] + b * first[j];
  });
}

// The gradients of x and of first, and of a and b in sums (2); `work`: 2 floats a row.
void nf_mix_grad(int threads, int64_t rows, int64_t width, const float* x, const float* first,
                 float a, float b, const float* grad, float* of_x, float* of_first, float* sums,
                 float* work) {
  share_rows(threads, rows, width, [=](int64_t i) {
    const int64_t at = i * width;
    work[2 * i] = dot(grad + at, x + at, width);
    work[2 * i + 1] = dot(grad + at, first + at, width);
    for (int64_t j = at; j < at + width; ++j) {
      of_x[j] = a * grad[j];
      of_first[j] = b * grad[j];
    }
  });
  double total[2] = {};
  for (int64_t i = 0; i < rows; ++i)
    for (int p = 0; p < 2; ++p) total[p] += work[2 * i + p];
  for (int p = 0; p < 2; ++p) sums[p] = total[p];
}
}
