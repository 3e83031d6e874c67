// Cross-entropy of soft-capped logits with its gradients; the formulas are those of model/loss.py.
#pragma once

#include <cmath>
#include <vector>

#include "products.h"

constexpr int ROWS = 512, COLS = 512;  // a block of tokens, a chunk of the vocabulary

typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

// e^x for |x| <= 87, with an error of 1-2 units in the last place: Cephes' expf.
static inline Vec exp_of(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504089f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Bf16Vec __attribute__((vector_size(2 * LANES)));

static inline Vec load(const uint16_t* from) {
  Bf16Vec v;
  std::memcpy(&v, from, sizeof v);
  const Bits bits = __builtin_convertvector(v, Bits) << 16;
  Vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rounds to the nearest bf16, of two equally near to the even one.
static inline void store(uint16_t* to, Vec x) {
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const Bf16Vec v = __builtin_convertvector(bits, Bf16Vec);
  std::memcpy(to, &v, sizeof v);
}

// With s = sigmoid(2 z / cap) and e = exp(2 cap s): replaces z, floats or bf16, by e s (1 - s), adds
// e to the sums.
template <class T>
__attribute__((noinline)) static void slopes(T* z, float* sums, int64_t count, float cap) {
  const auto step = [cap](T* z, float* sums) {
    Vec x = load(z) * (-2.0f / cap);
    x = x < -80.0f ? splat(-80.0f) : x > 80.0f ? splat(80.0f) : x;
    const Vec s = 1.0f / (1.0f + exp_of(x)), e = exp_of(s * (2.0f * cap));
    store(z, e * (s - s * s));
    store(sums, load(sums) + e);
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) step(z + i, sums + i);
  if (i < count) {
    T rest[LANES] = {};
    float rest_sums[LANES] = {};
    std::copy(z + i, z + count, rest);
    std::copy(sums + i, sums + count, rest_sums);
    step(rest, rest_sums);
    std::copy(rest, rest + count - i, z + i);
    std::copy(rest_sums, rest_sums + count - i, sums + i);
  }
}

struct Loss {
  int64_t tokens, width, vocab;
  const float *hidden, *weight;
  const int64_t* targets;
  const float* scale;  // of each token's loss; null: no gradients are wanted
  float cap;
  float *losses, *grad_hidden, *grad_weight;
  float* chunks;  // scratch of words x tokens: vocab x ROWS with gradients, COLS x ROWS without
  float* scaled;  // scratch: ROWS x width

  // Floats of scratch memory for a thread: for `multiply`, and B of pack_whole.
  static int64_t work_of(int64_t width) { return WORK + ROWS * ((width + NR - 1) / NR * NR); }

  // Tokens first..end of the block that begins at `block`: losses, the gradient of hidden.
  void read(int64_t block, int64_t first, int64_t end, float* work) const {
    const int64_t rows = end - first, height = std::min<int64_t>(ROWS, tokens - block);
    const float* h = hidden + first * width;
    float* packed = work + WORK;
    std::vector<double> total(rows);
    std::vector<float> picked(rows), sums(rows);
    pack_whole({h, 1, width}, rows, width, packed);
    for (int64_t v = 0; v < vocab; v += COLS) {
      const int64_t cols = std::min<int64_t>(COLS, vocab - v);
      float* z = chunks + (scale ? v * height : 0) + (first - block);
      const View words{weight + v * width, width, 1};
      multiply(cols, rows, width, words, {}, z, height, false, work, packed);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = targets[first + i] - v;
        if (0 <= at && at < cols) picked[i] = std::tanh(z[at * height + i] / cap);
      }
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t j = 0; j < cols; ++j) slopes(z + j * height, sums.data(), rows, cap);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = targets[first + i] - v;
        if (0 <= at && at < cols) z[at * height + i] = 0;  // has another formula, below
        total[i] += sums[i];
      }
      if (scale)
        multiply(rows, width, cols, {z, 1, height}, words, grad_hidden + first * width, width,
                 v > 0, work);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const double loss = std::log(total[i]) - cap - double(cap) * picked[i];
      losses[first + i] = loss;
      if (!scale) continue;
      // The target's logit has gradient p - 1 with p = exp(-loss): expm1 avoids cancellation. Times
      // its slope, 1 - tanh^2.
      const float factor = scale[first + i] * (4.0 / total[i]);
      const double share = std::expm1(-loss) * (1.0 - double(picked[i]) * picked[i]);
      const int64_t target = targets[first + i];
      chunks[target * height + first - block + i] = share * (total[i] / 4.0);
      const float of_target = scale[first + i] * share;
      for (int64_t j = 0; j < width; ++j) {
        float& grad = grad_hidden[(first + i) * width + j];
        grad = grad * factor + of_target * weight[target * width + j];
        scaled[(first - block + i) * width + j] = factor * h[i * width + j];
      }
    }
  }

  // Adds what the block gives to the gradient of the words first..end; the first block stores it.
  void add_words(int64_t block, int64_t first, int64_t end, float* work) const {
    const int64_t height = std::min<int64_t>(ROWS, tokens - block);
    const View rows{scaled, width, 1};
    pack_whole(rows, width, height, work + WORK);
    multiply(end - first, width, height, {chunks + first * height, height, 1}, rows,
             grad_weight + first * width, width, block > 0, work, work + WORK);
  }
};
