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
                 int steps, size_t ahead, Ints* sums) {
  const int32_t* w[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) w[c] = panels[c];
  for (int start = 0; start < steps; start += STRETCH<Form>) {
    const int end = steps - start > STRETCH<Form> ? start + STRETCH<Form> : steps;
    Ints sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = splat_int(0);
    for (int k = start; k < end; ++k) {
      Ints wk[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        wk[c] = load_ints(w[c] + k * stride);
        _mm_prefetch(reinterpret_cast<const char*>(w[c] + k * stride + ahead), _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Ints ak = splat_int(a[r * lda + k]);
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
          const Floats all = as_floats(sums[r * C + c]);
          sums[r * C + c] = as_ints(all + as_floats(sum[r][c]));
        }
  }
}

using Tile = void (*)(const int32_t*, size_t, const int32_t* const*, size_t, int, size_t, Ints*);

// By rows - 1, and panels: 1, 2, 4, 8; null: the sums would leave the registers.
#ifdef NF_AVX512
template <class Form>
static constexpr Tile TILES[MAX_TILE_ROWS][4] = {
    {tile<Form, 1, 1>, tile<Form, 1, 2>, tile<Form, 1, 4>, tile<Form, 1, 8>},
    {tile<Form, 2, 1>, tile<Form, 2, 2>, tile<Form, 2, 4>, tile<Form, 2, 8>},
    {tile<Form, 3, 1>, tile<Form, 3, 2>, tile<Form, 3, 4>, tile<Form, 3, 8>},
    {tile<Form, 4, 1>, tile<Form, 4, 2>, tile<Form, 4, 4>, nullptr},
    {tile<Form, 5, 1>, tile<Form, 5, 2>, tile<Form, 5, 4>, nullptr},
    {tile<Form, 6, 1>, tile<Form, 6, 2>, tile<Form, 6, 4>, nullptr},
};
constexpr int WIDEST[MAX_TILE_ROWS] = {3, 3, 3, 2, 2, 2};  // logarithms, by rows - 1
#else
template <class Form>
static constexpr Tile TILES[MAX_TILE_ROWS][4] = {
    {tile<Form, 1, 1>, tile<Form, 1, 2>, tile<Form, 1, 4>, nullptr},
    {tile<Form, 2, 1>, tile<Form, 2, 2>, nullptr, nullptr},
    {tile<Form, 3, 1>, nullptr, nullptr, nullptr},
    {tile<Form, 4, 1>, nullptr, nullptr, nullptr},
    {tile<Form, 5, 1>, nullptr, nullptr, nullptr},
    {tile<Form, 6, 1>, nullptr, nullptr, nullptr},
};
constexpr int WIDEST[MAX_TILE_ROWS] = {2, 1, 0, 0, 0, 0};
#endif

// The widest tile for `left` panels of `rows` rows: its panels' logarithm.
static inline int tile_width(int rows, int left) {
  int width = WIDEST[rows - 1];
  while (1 << width > left) --width;
  return width;
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
  alignas(64) Ints sums[MAX_TILE_ROWS * 4];
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
          Ints sum = sums[r * width + c];
          Floats out = as_floats(sum);
          if constexpr (Form::DEPTH == 4) {
            const int at = (p + c) * 16;
            const Ints shift = mul_ints(load_ints(m.sums + at), splat_int(a.zero));
            const Floats scale = load(m.scales + at) * splat(a.scales[row + r]);
            out = to_floats(sub_ints(sum, shift)) * scale;
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
    const Floats f = splat(factor);
    for (int i = 0; i < count; i += 16)
      store16<Form>(out, i, load(x + i) * f);
  } else {
    Floats most = splat(0.0f);
    for (int i = 0; i < count; i += 16)
      most = max(most, abs(load(x + i)));
    const float peak = largest(most), levels = positive ? 255.0f : 127.0f;
    const Floats f = splat(peak > 0.0f ? levels / peak : 0.0f);
    *scale = peak / levels * factor;
    const Ints zero = splat_int(positive ? 0 : 128);
    for (int i = 0; i < count; i += 16) {
      // No byte is exceeded: |x| <= peak, and numbers are negative only where the zero is 128.
      store_bytes(reinterpret_cast<uint8_t*>(out) + i, add_ints(to_ints(load(x + i) * f), zero));
    }
  }
}
