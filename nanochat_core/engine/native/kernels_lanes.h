// Vectors of 16 numbers: one register with AVX-512, two with AVX2. Sums over a vector's numbers are
// taken in the same order with both.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

using Mask = uint16_t;  // a bit for each number

// Bits first..end - 1 of a mask, of 0..16.
static inline Mask bits(int first, int end) {
  return static_cast<Mask>(((1u << std::clamp(end, 0, 16)) - 1) &
                           ~((1u << std::clamp(first, 0, 16)) - 1));
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define NF_AVX512

using Floats = __m512;  // + - * / are the compiler's
using Ints = __m512i;   // of 32 bits

static inline Floats splat(float x) { return _mm512_set1_ps(x); }
static inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline Ints load_ints(const int32_t* from) { return _mm512_loadu_si512(from); }
static inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
static inline void store_ints(float* to, Ints x) { _mm512_storeu_si512(to, x); }
static inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
static inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
static inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
static inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // the nearest
static inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
static inline Ints mul_ints(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// c - a b, a b - c
static inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
static inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
// Where a or b is NaN, b.
static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats nearest_integer(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x 2^n for integers n from -150 to 129
static inline Floats scale_by(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
static inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
static inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
static inline float first_of(Floats x) { return _mm512_cvtss_f32(x); }
// a where the mask has a bit, else b
static inline Floats select(Mask mask, Floats a, Floats b) {
  return _mm512_mask_blend_ps(mask, b, a);
}
static inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// What the mask has bits for, nothing else is read; `rest` for the others.
static inline Floats load_some(Mask mask, const float* from, Floats rest) {
  return _mm512_mask_loadu_ps(rest, mask, from);
}
// The sum of numbers from 0 to 2^31, each cut to an integer.
static inline int64_t sum_of_integers(Floats x) {
  return _mm512_reduce_add_epi64(
      _mm512_add_epi64(_mm512_cvttps_epi64(_mm512_castps512_ps256(x)),
                       _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x, 1))));
}
static inline void store_bytes(uint8_t* to, Ints x) {  // from 0 to 255
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(x));
}
static inline void store_bf16(uint16_t* to, Floats x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(to, &rounded, 32);
}
static inline Floats load_bf16(const uint16_t* from) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
// The first and the second number of each pair of bf16.
static inline Ints first_bf16(Ints x) { return _mm512_slli_epi32(x, 16); }
static inline Ints second_bf16(Ints x) { return _mm512_and_si512(x, splat_int(0xFFFF0000)); }
// sum += a w: of fp32, of pairs of bf16, of four unsigned with four signed bytes. Written as the
// instruction itself: through the intrinsics gcc 12 keeps the sums of a tile in memory, at a third
// of the speed.
static inline void step_fp32(Ints& sum, Ints a, Ints w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}
static inline void step_bf16(Ints& sum, Ints a, Ints w) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}
static inline void step_int8(Ints& sum, Ints a, Ints w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}

#else  // AVX2 and FMA

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

static inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Floats load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
static inline Ints load_ints(const int32_t* from) {
  const auto* both = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
}
static inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
static inline Floats as_floats(Ints x) {
  return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
static inline Ints as_ints(Floats x) {
  return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
static inline void store_ints(float* to, Ints x) { store(to, as_floats(x)); }
static inline Floats to_floats(Ints x) {
  return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
static inline Ints to_ints(Floats x) {
  return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
static inline Ints add_ints(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
static inline Ints sub_ints(Ints a, Ints b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
static inline Ints mul_ints(Ints a, Ints b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
static inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
static inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
static inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
static inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
static inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
static inline Floats fms(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
static inline Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
static inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
static inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
static inline Floats nearest_integer(Floats x) {
  constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, MODE), _mm256_round_ps(x.high, MODE)};
}
// 2^n
static inline __m256 power8(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline __m256 scale8(__m256 x, __m256 n) {
  // In two factors that are normal numbers: only the last product can round.
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return x * power8(half) * power8(_mm256_sub_epi32(whole, half));
}
static inline Floats scale_by(Floats x, Floats n) {
  return {scale8(x.low, n.low), scale8(x.high, n.high)};
}
static inline float sum_of(Floats x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
static inline float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return std::max(two[0], two[1]);
}
static inline float first_of(Floats x) { return x.low[0]; }
// All bits of a number where the mask has its bit.
static inline __m256i spread8(int mask) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), each), each);
}
static inline Floats select(Mask mask, Floats a, Floats b) {
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(spread8(mask))),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(spread8(mask >> 8)))};
}
static inline Mask at_least(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
  return static_cast<Mask>(
      low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)) << 8);
}
static inline Floats load_some(Mask mask, const float* from, Floats rest) {
  const Floats found = {_mm256_maskload_ps(from, spread8(mask)),
                        _mm256_maskload_ps(from + 8, spread8(mask >> 8))};
  return select(mask, found, rest);
}
static inline int64_t sum_of_integers(Floats x) {
  float each[16];
  store(each, x);
  int64_t sum = 0;
  for (const float value : each) sum += static_cast<int64_t>(value);
  return sum;
}
static inline void store_bytes(uint8_t* to, Ints x) {
  // Packing goes by halves of a register: 0-3, 8-11, 4-7, 12-15.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi16(_mm256_castsi256_si128(words),
                                    _mm256_extracti128_si256(words, 1)));
}
// The nearest bf16, of two the even one, in the lower halves; a NaN stays one.
static inline __m256i round8(__m256 x) {
  const __m256i raw = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(raw, 16), one);
  const __m256i up = _mm256_add_epi32(raw, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}
static inline void store_bf16(uint16_t* to, Floats x) {
  const __m256i packed = _mm256_packus_epi32(round8(x.low), round8(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline __m256 load8_bf16(const uint16_t* from) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
static inline Floats load_bf16(const uint16_t* from) {
  return {load8_bf16(from), load8_bf16(from + 8)};
}
static inline void step8(__m256i& sum, __m256i a, __m256i w) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
}
static inline void step_fp32(Ints& sum, Ints a, Ints w) {
  step8(sum.low, a.low, w.low);
  step8(sum.high, a.high, w.high);
}
static inline Ints first_bf16(Ints x) {
  return {_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)};
}
static inline Ints second_bf16(Ints x) {
  const __m256i upper = _mm256_set1_epi32(0xFFFF0000);
  return {_mm256_and_si256(x.low, upper), _mm256_and_si256(x.high, upper)};
}
static inline void step_bf16(Ints& sum, Ints a, Ints w) {
  step_fp32(sum, first_bf16(a), first_bf16(w));
  step_fp32(sum, second_bf16(a), second_bf16(w));
}
static inline void step8_int8(__m256i& sum, __m256i a, __m256i w) {
  // Even and odd bytes as 16-bit numbers: a product of bytes would saturate.
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xFF)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(w, 8));
  sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
static inline void step_int8(Ints& sum, Ints a, Ints w) {
  step8_int8(sum.low, a.low, w.low);
  step8_int8(sum.high, a.high, w.high);
}

#endif
