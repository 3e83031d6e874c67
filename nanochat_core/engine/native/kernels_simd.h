// Vectors of 16 floats, and the three forms of numbers that matrices are multiplied in.
//
// Nothing here is contracted or reordered by the compiler (-ffp-contract=off, no fast math): what a
// row computes must not depend on the function it is inlined into.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// A form packs DEPTH numbers of a row of activations into 32 bits, and the same of 16 matrix
// columns into 512; `step` multiplies and adds to 16 sums. A sum takes its products one step after
// the other, always: that makes a row's result the same whatever rows it is computed with.
//
// `step` is written as the instruction itself: through the intrinsics gcc 12 keeps the sums of a
// tile in memory, at a third of the speed.
struct Fp32 {
  static constexpr int DEPTH = 1;
  static inline void step(__m512i& sum, __m512i a, __m512i w) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
  }
};

struct Bf16 {
  static constexpr int DEPTH = 2;
  static inline void step(__m512i& sum, __m512i a, __m512i w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
  }
};

// Activations are unsigned here, weights signed: the instruction asks for it.
struct Int8 {
  static constexpr int DEPTH = 4;
  static inline void step(__m512i& sum, __m512i a, __m512i w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
  }
};

static inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// e^x with an error of 1-2 units in the last place; 0 far below, infinity far above.
static inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(89.0f)), _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504089f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  // Cephes' expf polynomial on [-ln 2 / 2, ln 2 / 2].
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// cap * tanh(x / cap)
static inline __m512 softcap16(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp16(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
  const __m512 tanh = _mm512_sub_ps(
      one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
}

static inline float sigmoid(float x) {
  const __m512 e = exp16(_mm512_set1_ps(-x));
  return 1.0f / (1.0f + _mm512_cvtss_f32(e));
}

// Sixteen numbers as the forms Fp32 and Bf16 keep them in memory: `at` counts numbers.
template <class Form>
static inline void store16(int32_t* base, size_t at, __m512 x) {
  if constexpr (Form::DEPTH == 1) {
    _mm512_storeu_ps(reinterpret_cast<float*>(base) + at, x);
  } else {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    std::memcpy(reinterpret_cast<uint16_t*>(base) + at, &rounded, 32);
  }
}

template <class Form>
static inline __m512 load16(const void* base, size_t at) {
  if constexpr (Form::DEPTH == 1) {
    return _mm512_loadu_ps(static_cast<const float*>(base) + at);
  } else {
    const __m256i raw = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(base) + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
}

// 1 / rms of `count` numbers that stand in `padded` places, the others 0.
static inline float inverse_rms(const float* x, int padded, int count, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < padded; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / static_cast<float>(count) + eps);
}
