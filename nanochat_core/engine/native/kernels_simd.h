// The three forms of numbers that matrices are multiplied in, and functions of 16 floats.
//
// Nothing here is contracted or reordered by the compiler (-ffp-contract=off, no fast math): what a
// row computes must not depend on the function it is inlined into.
#pragma once

#include <cstddef>

#include "kernels_lanes.h"

// A form packs DEPTH numbers of a row of activations into 32 bits, and the same of 16 matrix
// columns into a vector; `step` multiplies and adds to 16 sums. A sum takes its products one step
// after the other, always: that makes a row's result the same whatever rows it is computed with.
struct Fp32 {
  static constexpr int DEPTH = 1;
  static inline void step(Ints& sum, Ints a, Ints w) { step_fp32(sum, a, w); }
};

struct Bf16 {
  static constexpr int DEPTH = 2;
  static inline void step(Ints& sum, Ints a, Ints w) { step_bf16(sum, a, w); }
};

// Activations are unsigned here, weights signed: AVX-512's instruction asks for it.
struct Int8 {
  static constexpr int DEPTH = 4;
  static inline void step(Ints& sum, Ints a, Ints w) { step_int8(sum, a, w); }
};

static inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// e^x with an error of 1-2 units in the last place; 0 far below, infinity far above, NaN of a NaN.
static inline Floats exp16(Floats x) {
  x = max(splat(-104.0f), min(splat(89.0f), x));
  const Floats n = nearest_integer(x * splat(1.44269504089f));
  Floats r = fnma(n, splat(0.693359375f), x);  // ln 2 in two parts
  r = fnma(n, splat(-2.12194440e-4f), r);
  // Cephes' expf polynomial on [-ln 2 / 2, ln 2 / 2].
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + splat(1.0f));
  return scale_by(p, n);
}

// cap * tanh(x / cap)
static inline Floats softcap16(Floats x, float cap) {
  const Floats one = splat(1.0f);
  const Floats e = exp16(x * splat(2.0f / cap));
  const Floats tanh = one - splat(2.0f) / (e + one);
  return tanh * splat(cap);
}

static inline float sigmoid(float x) {
  const Floats e = exp16(splat(-x));
  return 1.0f / (1.0f + first_of(e));
}

// Sixteen numbers as the forms Fp32 and Bf16 keep them in memory: `at` counts numbers.
template <class Form>
static inline void store16(int32_t* base, size_t at, Floats x) {
  if constexpr (Form::DEPTH == 1) {
    store(reinterpret_cast<float*>(base) + at, x);
  } else {
    store_bf16(reinterpret_cast<uint16_t*>(base) + at, x);
  }
}

template <class Form>
static inline Floats load16(const void* base, size_t at) {
  if constexpr (Form::DEPTH == 1) {
    return load(static_cast<const float*>(base) + at);
  } else {
    return load_bf16(static_cast<const uint16_t*>(base) + at);
  }
}

// 1 / rms of `count` numbers that stand in `padded` places, the others 0.
static inline float inverse_rms(const float* x, int padded, int count, float eps) {
  Floats sum = splat(0.0f);
  for (int i = 0; i < padded; i += 16) {
    const Floats v = load(x + i);
    sum = fma(v, v, sum);
  }
  return 1.0f / __builtin_sqrtf(sum_of(sum) / static_cast<float>(count) + eps);
}
