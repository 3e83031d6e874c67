// Products of a few to a few hundred rows with a packed matrix.
//
// A matrix of N outputs and K inputs is kept as panels of 16 outputs, [N/16][K/DEPTH][16][DEPTH]:
// one 64-byte load is one step of 16 outputs, and serves up to 6 rows from registers. 16 steps of a
// panel are a register of AMX as they lie: with NF_TILES it multiplies up to 32 rows at a time.
#pragma once

#include <algorithm>

#include "kernels_simd.h"
#ifdef NF_TILES
#include "kernels_tiles.h"
#endif

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

// A row's sum of 16 outputs from `at` on as floats.
template <class Form>
static inline Floats scaled(const Matrix& m, const Activations& a, int row, int at, Ints sum) {
  if constexpr (Form::DEPTH < 4) {
    return as_floats(sum);
  } else {
    const Ints shift = mul_ints(load_ints(m.sums + at), splat_int(a.zero));
    return to_floats(sub_ints(sum, shift)) * (load(m.scales + at) * splat(a.scales[row]));
  }
}

#ifdef NF_TILES

constexpr int TILE = 16;  // rows of a register of AMX, and its words in a row

// Registers 0..3: sums of two blocks of rows and two panels, or of one block and four panels; 4 and
// 5: rows; 6 and 7: panels. Four sums, since a product takes as long as three others to its sum.
static inline void set_tiles(int rows) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    const int block = rows <= TILE ? 0 : i < 4 ? i / 2 : i - 4;
    shapes.rows[i] = i >= 6 ? TILE : std::min(rows - block * TILE, TILE);
    shapes.row_bytes[i] = 64;
  }
  set_tile_shapes(shapes);
}

static inline void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

template <class Form, int SUM, int A, int B>
static inline void tile_products() {
  if constexpr (Form::DEPTH == 2) tile_bf16_products<SUM, A, B>();
  else tile_int8_products<SUM, A, B>();
}

// Adds the products of the rows in register 4, and of those in 5 if R is 2, with panel C at `w`;
// what stands `ahead` words further will be read soon, unless that is 0.
template <class Form, int R, int C>
static inline void tile_panel(const int32_t* w, size_t ahead) {
  constexpr int B = 6 + C % 2;
  if (ahead)
#pragma GCC unroll 16
    for (int i = 0; i < TILE; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(w + ahead + i * TILE), _MM_HINT_T1);
  tile_load<B>(w, TILE * 4);
  tile_products<Form, C, 4, B>();
  if constexpr (R > 1) tile_products<Form, 2 + C, 5, B>();
}

// sums[2 r + c]: R blocks of rows by C panels, R * C at most 4.
template <class Form, int R, int C>
static void tile_block(const int32_t* a, size_t lda, const int32_t* w, size_t panel_words,
                       int steps, size_t ahead, int32_t (*sums)[TILE][TILE]) {
  zero_sums();
  for (int k = 0; k < steps; k += TILE) {
    const int32_t* wk = w + k * TILE;
    tile_load<4>(a + k, lda * 4);
    if constexpr (R > 1) tile_load<5>(a + TILE * lda + k, lda * 4);
    tile_panel<Form, R, 0>(wk, ahead);
    if constexpr (C > 1) tile_panel<Form, R, 1>(wk + panel_words, ahead);
    if constexpr (C > 2) tile_panel<Form, R, 2>(wk + 2 * panel_words, ahead);
    if constexpr (C > 3) tile_panel<Form, R, 3>(wk + 3 * panel_words, ahead);
  }
  tile_store<0>(sums[0], TILE * 4);
  if constexpr (C > 1) tile_store<1>(sums[1], TILE * 4);
  if constexpr (R > 1 || C > 2) tile_store<2>(sums[2], TILE * 4);
  if constexpr (R * C > 3) tile_store<3>(sums[3], TILE * 4);
}

// A matrix in bf16 whose inputs fill registers takes tiles for whatever rows, another never: a
// row's bits depend on the matrix alone. Int8's sums are exact, and few rows are faster without.
template <class Form>
static inline bool takes_tiles(const Matrix& m, int num_rows) {
  return Form::DEPTH > 1 && m.steps % TILE == 0 && (Form::DEPTH == 2 || num_rows >= TILE);
}

template <class Form, class Take>
static void multiply_tiles(const Matrix& m, const Activations& a, int first_row, int num_rows,
                           int first_panel, int num_panels, Take take) {
  using Block = void (*)(const int32_t*, size_t, const int32_t*, size_t, int,
                         size_t, int32_t (*)[TILE][TILE]);
  constexpr Block ONE[4] = {tile_block<Form, 1, 1>, tile_block<Form, 1, 2>, tile_block<Form, 1, 3>,
                            tile_block<Form, 1, 4>},
                  TWO[2] = {tile_block<Form, 2, 1>, tile_block<Form, 2, 2>};
  const size_t panel_words = static_cast<size_t>(m.steps) * TILE;
  alignas(64) int32_t sums[4][TILE][TILE];
  int shaped = 0;
  // The panels stay in the cache while all rows pass.
  const int most = num_rows > TILE ? 2 : 4;
  const size_t group = most * panel_words, ahead = group <= NEAR ? group : 512;
  for (int p = first_panel; p < first_panel + num_panels; p += most) {
    const int width = std::min(most, first_panel + num_panels - p);
    for (int done = 0; done < num_rows; done += 2 * TILE) {
      const int row = first_row + done, rows = std::min(2 * TILE, num_rows - done);
      if (rows != shaped) set_tiles(shaped = rows);
      (rows > TILE ? TWO : ONE)[width - 1](a.data + row * a.lda, a.lda, m.data + p * panel_words,
                                           panel_words, m.steps, done ? 0 : ahead, sums);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < width; ++c)
          take(row + r, p + c,
               scaled<Form>(m, a, row + r, (p + c) * 16,
                            load_ints(sums[r / TILE * 2 + c][r % TILE])));
    }
  }
  release_tiles();
}

#endif

// take(row, panel, 16 outputs) for rows first_row.. and panels first_panel.. .
template <class Form, class Take>
static void multiply(const Matrix& m, const Activations& a, int first_row, int num_rows,
                     int first_panel, int num_panels, Take take) {
#ifdef NF_TILES
  if constexpr (Form::DEPTH > 1)
    if (takes_tiles<Form>(m, num_rows))
      return multiply_tiles<Form>(m, a, first_row, num_rows, first_panel, num_panels, take);
#endif
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
        for (int c = 0; c < width; ++c)
          take(row + r, p + c,
               scaled<Form>(m, a, row + r, (p + c) * 16, sums[r * width + c]));
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
