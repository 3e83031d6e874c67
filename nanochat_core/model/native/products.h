// Matrix products in fp32: C (+)= A B, of any strides, on one thread.
//
// An element's products are added in the order of K, in blocks of KC, wherever its tile lies: its
// bits depend neither on the number of threads nor on the other rows of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16, MR = 12;  // 24 sums, 2 of B and 1 of A in 32 registers
#else
constexpr int LANES = 8, MR = 6;  // 12 sums, 2 of B and 1 of A in 16 registers
#endif
constexpr int NR = 2 * LANES;
// A panel of B (KC x NR) stays in the L1 cache, a block of A (MC x KC) in L2, B's (KC x NC) in L3.
constexpr int KC = 256, MC = 96, NC = 1024;
constexpr int64_t WORK = int64_t(KC) * (MC + NC);  // floats of scratch memory for a thread

typedef float Vec __attribute__((vector_size(4 * LANES)));

static inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
static inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
static inline Vec splat(float x) { return x - Vec{}; }

// An element (i, j) is at data[i * row + j * col].
struct View {
  const float* data;
  int64_t row, col;
  View at(int64_t i, int64_t j) const { return {data + i * row + j * col, row, col}; }
};

// Stores `count` rows of a view by panels of WIDTH of them, [panel][k][WIDTH], padded with zeros.
template <int WIDTH>
__attribute__((noinline)) static void pack(View from, int64_t count, int64_t depth, float* to) {
  for (int64_t first = 0; first < count; first += WIDTH, to += WIDTH * depth) {
    const int64_t rows = std::min<int64_t>(WIDTH, count - first);
    const View part = from.at(first, 0);
    if (rows < WIDTH) {
      std::memset(to, 0, sizeof(float) * WIDTH * depth);
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < rows; ++i) to[k * WIDTH + i] = part.data[i * part.row + k * part.col];
    } else if (part.row == 1) {
      for (int64_t k = 0; k < depth; ++k)
        std::memcpy(to + k * WIDTH, part.data + k * part.col, sizeof(float) * WIDTH);
    } else {
      for (int64_t k = 0; k < depth; k += 16)  // a cache line of each row after the other
        for (int i = 0; i < WIDTH; ++i)
          for (int64_t j = k; j < std::min(k + 16, depth); ++j)
            to[j * WIDTH + i] = part.data[i * part.row + j * part.col];
    }
  }
}

// A tile of C, MR x NR: the sum of products, added to C or stored. B is a packed panel; A is one or
// lies in rows, `row` floats apart.
template <bool PACKED>
__attribute__((noinline)) static void tile(int64_t depth, const float* a, int64_t row,
                                           const float* b, float* c, int64_t ldc, int rows,
                                           int cols, bool add) {
  Vec sum[MR][2] = {};
  // Two pointers, for rows 0.. and MR / 2..: more strides than registers would be spilled.
  const float* half = a + MR / 2 * row;
  for (int64_t k = 0; k < depth; ++k, b += NR, a += PACKED ? MR : 1, half += PACKED ? MR : 1) {
    const Vec b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      const Vec x = splat(PACKED ? a[i] : i < MR / 2 ? a[i * row] : half[(i - MR / 2) * row]);
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
  }
  if (rows == MR && cols == NR) {
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      float* to = c + i * ldc;
      store(to, add ? load(to) + sum[i][0] : sum[i][0]);
      store(to + LANES, add ? load(to + LANES) + sum[i][1] : sum[i][1]);
    }
    return;
  }
  float whole[MR][NR];
  std::memcpy(whole, sum, sizeof whole);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j)
      c[i * ldc + j] = add ? c[i * ldc + j] + whole[i][j] : whole[i][j];
}

// C (m x n) with a block of B that is packed (depth <= KC, n <= NC).
static void multiply_block(int64_t m, int64_t n, int64_t depth, View a, const float* b, float* c,
                           int64_t ldc, bool add, float* packed_a) {
  for (int64_t i0 = 0; i0 < m; i0 += MC) {
    const int64_t rows = std::min<int64_t>(MC, m - i0);
    // Whole panels of rows that lie in memory as they are read need no packing.
    const int64_t in_place = a.col == 1 ? rows / MR * MR : 0;
    if (in_place < rows) pack<MR>(a.at(i0 + in_place, 0), rows - in_place, depth, packed_a);
    for (int64_t j = 0; j < n; j += NR)
      for (int64_t i = 0; i < rows; i += MR) {
        const int tall = std::min<int64_t>(MR, rows - i), wide = std::min<int64_t>(NR, n - j);
        float* to = c + (i0 + i) * ldc + j;
        if (i < in_place)
          tile<false>(depth, a.at(i0 + i, 0).data, a.row, b + j * depth, to, ldc, tall, wide, add);
        else
          tile<true>(depth, packed_a + (i - in_place) * depth, 1, b + j * depth, to, ldc, tall,
               wide, add);
      }
  }
}

// C (m x n, rows at ldc) = A (m x depth) B (depth x n), added to what C holds with `add`.
// `work`: WORK floats, or where B is packed already MC * KC, and B as pack_whole left it.
static void multiply(int64_t m, int64_t n, int64_t depth, View a, View b, float* c, int64_t ldc,
                     bool add, float* work, const float* packed = nullptr) {
  for (int64_t j0 = 0; j0 < n; j0 += NC) {
    const int64_t cols = std::min<int64_t>(NC, n - j0), wide = (cols + NR - 1) / NR * NR;
    for (int64_t k0 = 0; k0 < depth; k0 += KC) {
      const int64_t ks = std::min<int64_t>(KC, depth - k0);
      const View part = b.at(k0, j0);
      float* own = work + int64_t(MC) * KC;
      if (!packed) pack<NR>({part.data, part.col, part.row}, cols, ks, own);
      multiply_block(m, cols, ks, a.at(0, k0), packed ? packed : own, c + j0, ldc, add || k0 > 0,
                     work);
      if (packed) packed += wide * ks;
    }
  }
}

// Packs all of B (depth x n) for `multiply`: depth times n, rounded up to NR.
static void pack_whole(View b, int64_t n, int64_t depth, float* to) {
  for (int64_t j0 = 0; j0 < n; j0 += NC) {
    const int64_t cols = std::min<int64_t>(NC, n - j0), wide = (cols + NR - 1) / NR * NR;
    for (int64_t k0 = 0; k0 < depth; k0 += KC) {
      const int64_t ks = std::min<int64_t>(KC, depth - k0);
      const View part = b.at(k0, j0);
      pack<NR>({part.data, part.col, part.row}, cols, ks, to);
      to += wide * ks;
    }
  }
}
