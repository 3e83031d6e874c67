// Products of a few to a few hundred rows with a packed matrix.
//
// A matrix of N outputs and K inputs is kept as panels of 16 outputs, [N/16][K/DEPTH][16][DEPTH]:
// one 64-byte load is one step of 16 outputs, and serves up to 6 rows from registers.
#pragma once

#include <algorithm>

#include "kernels_simd.h"

constexpr int MAX_TILE_ROWS = 6, MAX_TILE_PANELS = 8;
constexpr size_t NEAR = 1 << 16;  // words, a quarter of a second-level cache of 1 MB

struct Matrix {
  const int32_t* data;
  const float* scales;  // Int8: of each output
  const int32_t* sums;  // Int8: of each output's weights
  int32_t panels;
  int32_t steps;  // K / DEPTH
};

// Steps whose products are summed before they join the others, so that rounding grows with the
// square root of K only. The other forms round their inputs far more than that.
template <class Form>
static constexpr int STRETCH = Form::DEPTH == 1 ? 64 : 1 << 30;

// sums[r * C + c] of R rows (lda 32-bit words apart) and C panels; `stride` words between
// steps; what stands `ahead` words further will be read soon.
template <class Form, int R, int C>
static void tile(const int32_t* a, size_t lda, const int32_t* const* panels, size_t stride,
                 int steps, size_t ahead, __m512i* sums) {
  const int32_t* w[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) w[c] = panels[c];
  for (int start = 0; start < steps; start += STRETCH<Form>) {
    const int end = steps - start > STRETCH<Form> ? start + STRETCH<Form> : steps;
    __m512i sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_si512();
    for (int k = start; k < end; ++k) {
      __m512i wk[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        wk[c] = _mm512_loadu_si512(w[c] + k * stride);
        _mm_prefetch(reinterpret_cast<const char*>(w[c] + k * stride + ahead), _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i ak = _mm512_set1_epi32(a[r * lda + k]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) Form::step(sum[r][c], ak, wk[c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        if (Form::DEPTH > 1 || start == 0) {
          sums[r * C + c] = sum[r][c];
        } else {
          const __m512 all = _mm512_castsi512_ps(sums[r * C + c]);
          sums[r * C + c] =
              _mm512_castps_si512(_mm512_add_ps(all, _mm512_castsi512_ps(sum[r][c])));
        }
  }
}

using Tile = void (*)(const int32_t*, size_t, const int32_t* const*, size_t, int, size_t,
                      __m512i*);

// By rows - 1, and panels: 1, 2, 4, 8. Eight panels of more than three rows leave the registers.
template <class Form>
static constexpr Tile TILES[MAX_TILE_ROWS][4] = {
    {tile<Form, 1, 1>, tile<Form, 1, 2>, tile<Form, 1, 4>, tile<Form, 1, 8>},
    {tile<Form, 2, 1>, tile<Form, 2, 2>, tile<Form, 2, 4>, tile<Form, 2, 8>},
    {tile<Form, 3, 1>, tile<Form, 3, 2>, tile<Form, 3, 4>, tile<Form, 3, 8>},
    {tile<Form, 4, 1>, tile<Form, 4, 2>, tile<Form, 4, 4>, nullptr},
    {tile<Form, 5, 1>, tile<Form, 5, 2>, tile<Form, 5, 4>, nullptr},
    {tile<Form, 6, 1>, tile<Form, 6, 2>, tile<Form, 6, 4>, nullptr},
};

// The widest tile for `left` panels of `rows` rows: its panels' logarithm.
static inline int tile_width(int rows, int left) {
  if (left >= 8 && rows <= 3) return 3;
  return left >= 4 ? 2 : left >= 2 ? 1 : 0;
}

// Activations as a matrix takes them, rows lda words apart. Int8: (byte - zero) * scale of the row.
struct Activations {
  const int32_t* data;
  size_t lda;
  const float* scales;
  int zero;
};

// take(row, panel, 16 outputs) for rows first_row.. and panels first_panel.. .
template <class Form, class Take>
static void multiply(const Matrix& m, const Activations& a, int first_row, int num_rows,
                     int first_panel, int num_panels, Take take) {
  const int blocks = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  const size_t panel_words = static_cast<size_t>(m.steps) * 16;
  alignas(64) __m512i sums[MAX_TILE_ROWS * 4];
  static_assert(MAX_TILE_ROWS * 4 >= 3 * MAX_TILE_PANELS);
  const int biggest = (num_rows + blocks - 1) / blocks;
  for (int p = first_panel; p < first_panel + num_panels;) {
    const int log_width = tile_width(biggest, first_panel + num_panels - p), width = 1 << log_width;
    const int32_t* panels[MAX_TILE_PANELS];
    for (int c = 0; c < width; ++c) panels[c] = m.data + (p + c) * panel_words;
    // The first block of rows brings the panels in from memory. Short ones end before the
    // processor's prefetcher has found their direction: the next ones are prefetched explicitly.
    const size_t whole = width * panel_words, ahead = whole <= NEAR ? whole : 512;
    for (int b = 0; b < blocks; ++b) {
      const int row = first_row + b * num_rows / blocks;
      const int rows = first_row + (b + 1) * num_rows / blocks - row;
      TILES<Form>[rows - 1][log_width](a.data + row * a.lda, a.lda, panels, 16, m.steps,
                                       b == 0 ? ahead : 0, sums);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < width; ++c) {
          __m512i sum = sums[r * width + c];
          __m512 out = _mm512_castsi512_ps(sum);
          if constexpr (Form::DEPTH == 4) {
            const int at = (p + c) * 16;
            const __m512i shift = _mm512_mullo_epi32(_mm512_loadu_si512(m.sums + at),
                                                     _mm512_set1_epi32(a.zero));
            out = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, shift)),
                                _mm512_mul_ps(_mm512_loadu_ps(m.scales + at),
                                              _mm512_set1_ps(a.scales[row + r])));
          }
          take(row + r, p + c, out);
        }
    }
    p += width;
  }
}

// x (count numbers, a multiple of 16) times `factor`, in a form's packing; Int8 sets the scale.
// Int8 spends all 256 values: numbers that are never negative (`positive`) have their zero at 0.
template <class Form>
static void pack_row(const float* x, int count, float factor, bool positive, int32_t* out,
                     float* scale) {
  if constexpr (Form::DEPTH < 4) {
    const __m512 f = _mm512_set1_ps(factor);
    for (int i = 0; i < count; i += 16)
      store16<Form>(out, i, _mm512_mul_ps(_mm512_loadu_ps(x + i), f));
  } else {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16)
      most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float peak = _mm512_reduce_max_ps(most), levels = positive ? 255.0f : 127.0f;
    const __m512 f = _mm512_set1_ps(peak > 0.0f ? levels / peak : 0.0f);
    *scale = peak / levels * factor;
    const __m512i zero = _mm512_set1_epi32(positive ? 0 : 128);
    for (int i = 0; i < count; i += 16) {
      const __m512i q = _mm512_add_epi32(
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), f)), zero);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(reinterpret_cast<uint8_t*>(out) + i),
                       _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512())));
    }
  }
}
