// Attention over pages of 16 keys, and how keys and values stand in a page.
//
// A page's keys of one head are a panel like a matrix's ([D/DEPTH][16 keys][DEPTH]), so that scores
// are the same tiles as any product; its values are [16/DEPTH][D][DEPTH]. Scores of a query are
// summed page by page from the first that it sees, whichever rows it shares a tile with. With
// NF_TILES products have the bits of AMX's registers, which one query does not use: it would fill a
// sixteenth of them, and vectors read its pages faster.
#pragma once

#include <cmath>
#include <limits>

#include "kernels_matrix.h"

constexpr int PAGE = 16;
#ifdef NF_TILES
constexpr int MAX_QUERIES = TILE;  // that share a pass over their pages
#else
constexpr int MAX_QUERIES = 4;
#endif

// What one thread needs to attend: queries, scores, probabilities, outputs of MAX_QUERIES.
struct AttentionSpace {
  int32_t* queries;
  float* scores;
  int32_t* weights;
  const int32_t** pages;
  size_t score_stride;  // numbers from one query's scores to the next one's
};

// One key and value (packed as Form does, `width` numbers) to place `at` of a page's head. The
// first key of a page clears it: what an earlier tenant left must reach no sum, not even times 0.
template <class Form>
static void write_key_value(int32_t* keys, int32_t* values, int at, int width, const int32_t* key,
                            const int32_t* value) {
  const int words = width / Form::DEPTH;
  if (at == 0) {
    std::memset(keys, 0, sizeof(int32_t) * words * PAGE);
    std::memset(values, 0, sizeof(int32_t) * words * PAGE);
  }
  for (int j = 0; j < words; ++j) keys[j * PAGE + at] = key[j];
  if constexpr (Form::DEPTH == 1) {
    std::memcpy(values + at * width, value, sizeof(int32_t) * width);
  } else {
    const auto* from = reinterpret_cast<const uint16_t*>(value);
    auto* to = reinterpret_cast<uint16_t*>(values) + (at / 2) * width * 2 + at % 2;
    for (int d = 0; d < width; ++d) to[2 * d] = from[d];
  }
}

#ifdef NF_TILES

// Registers 0..3: sums of four pages, or of four panels of 16 channels; 4: queries; 5: weights of a
// page; 6: 16 steps of a page's keys; 7: a panel of a page's values.
static inline void set_attention_tiles(int count) {
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = i == 6 ? TILE : i == 7 ? PAGE / 2 : count;
    shapes.row_bytes[i] = i == 5 ? PAGE * 2 : 64;
  }
  set_tile_shapes(shapes);
}

template <int SUM, int A, int B>
static inline void tile_step(const int32_t* b, size_t stride) {
  tile_load<B>(b, stride * 4);
  tile_bf16_products<SUM, A, B>();
}

// `some` registers, 1 to 4; row r of the c-th at to + 16 c + r stride.
static inline void store_sums(int some, float* to, size_t stride) {
  tile_store<0>(to, stride * 4);
  if (some > 1) tile_store<1>(to + TILE, stride * 4);
  if (some > 2) tile_store<2>(to + 2 * TILE, stride * 4);
  if (some > 3) tile_store<3>(to + 3 * TILE, stride * 4);
}

// sums[c] += STEPS steps of a row by panel c, as a product of registers adds them: with the same bits
// unless a sum is below 1e-30, which no attention reaches; registers take the smallest numbers as 0.
template <int C, int STEPS>
static inline void row_step(const int32_t* a, const int32_t* const* panels, size_t at,
                            size_t stride, Floats* sums) {
  Ints first[C], second[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) first[c] = second[c] = splat_int(0);
#pragma GCC unroll 16
  for (int k = 0; k < STEPS; ++k) {
    const Ints ak = splat_int(a[k]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const Ints w = load_ints(panels[c] + at + k * stride);
      step_fp32(first[c], first_bf16(ak), first_bf16(w));
      step_fp32(second[c], second_bf16(ak), second_bf16(w));
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c)
    sums[c] = sums[c] + (as_floats(first[c]) + as_floats(second[c]));
}

// Scores of one query with C pages.
template <int C>
static void score_row(const int32_t* query, int words, const int32_t* const* pages, float* scores) {
  Floats sums[C];
  for (int c = 0; c < C; ++c) sums[c] = splat(0.0f);
  for (int k = 0; k < words; k += TILE) row_step<C, TILE>(query + k, pages, k * TILE, TILE, sums);
  for (int c = 0; c < C; ++c) store(scores + c * PAGE, sums[c]);
}

// space.scores of all queries and pages.
template <class Form>
static void score(const AttentionSpace& space, int count, int words, int num_pages) {
  static_assert(Form::DEPTH == 2);
  if (count == 1) {
    int p = 0;
    for (; p + 4 <= num_pages; p += 4)
      score_row<4>(space.queries, words, space.pages + p, space.scores + p * PAGE);
    for (; p < num_pages; ++p)
      score_row<1>(space.queries, words, space.pages + p, space.scores + p * PAGE);
    return;
  }
  set_attention_tiles(count);
  for (int p = 0; p < num_pages; p += 4) {
    const int some = std::min(4, num_pages - p);
    const int32_t* const* keys = space.pages + p;
    zero_sums();
    for (int k = 0; k < words; k += TILE) {
      tile_load<4>(space.queries + k, words * 4);
      tile_step<0, 4, 6>(keys[0] + k * TILE, TILE);
      if (some > 1) tile_step<1, 4, 6>(keys[1] + k * TILE, TILE);
      if (some > 2) tile_step<2, 4, 6>(keys[2] + k * TILE, TILE);
      if (some > 3) tile_step<3, 4, 6>(keys[3] + k * TILE, TILE);
    }
    store_sums(some, space.scores + p * PAGE, space.score_stride);
  }
}

// Outputs of one query, C panels of channels from `first` on.
template <int C>
static void weigh_row(const int32_t* weights, const int32_t* const* pages, int num_pages,
                      size_t width, size_t first, Floats* sums) {
  for (int c = 0; c < C; ++c) sums[c] = splat(0.0f);
  for (int p = 0; p < num_pages; ++p) {
    const int32_t* panels[C];
    for (int c = 0; c < C; ++c) panels[c] = pages[p] + first + c * TILE;
    row_step<C, PAGE / 2>(weights + p * PAGE / 2, panels, 0, width, sums);
  }
}

// take(query, channel, 16 outputs) of all channels: weights x values over sums[query].
template <class Form, class Take>
static void weigh_all(const AttentionSpace& space, const float* sums, int count, int width,
                      int num_pages, Take take) {
  if (count == 1) {
    Floats row[8];
    for (int first = 0; first < width;) {
      const int panels = width - first < 8 * TILE ? 2 : 8;  // a head has an even number of them
      (panels == 8 ? weigh_row<8> : weigh_row<2>)(space.weights, space.pages, num_pages, width,
                                                  first, row);
      for (int c = 0; c < panels; ++c) take(0, first + c * TILE, row[c] / splat(sums[0]));
      first += panels * TILE;
    }
    return;
  }
  const size_t lda = space.score_stride / Form::DEPTH;
  alignas(64) float out[TILE][4 * TILE];
  for (int first = 0; first < width; first += 4 * TILE) {
    const int some = std::min(4, (width - first) / TILE);
    zero_sums();
    for (int p = 0; p < num_pages; ++p) {
      const int32_t* values = space.pages[p] + first;
      tile_load<5>(space.weights + p * PAGE / Form::DEPTH, lda * 4);
      tile_step<0, 5, 7>(values, width);
      if (some > 1) tile_step<1, 5, 7>(values + TILE, width);
      if (some > 2) tile_step<2, 5, 7>(values + 2 * TILE, width);
      if (some > 3) tile_step<3, 5, 7>(values + 3 * TILE, width);
    }
    store_sums(some, out[0], 4 * TILE);
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < some; ++c)
        take(i, first + TILE * c, load(out[i] + TILE * c) / splat(sums[i]));
  }
  release_tiles();
}

#else

// sums[r][c] += weights[r] x values of C * 16 channels, over all pages.
template <class Form, int R, int C>
static void weigh(const int32_t* weights, size_t lda, const int32_t* const* pages, int num_pages,
                  int width, size_t first, Floats* sums) {
  constexpr int STEPS = PAGE / Form::DEPTH;
  Ints sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = splat_int(0);
  for (int p = 0; p < num_pages; ++p)
    for (int k = 0; k < STEPS; ++k) {
      const int32_t* values = pages[p] + k * width + first;
      Ints v[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) v[c] = load_ints(values + 16 * c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Ints w = splat_int(weights[r * lda + p * STEPS + k]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) Form::step(sum[r][c], w, v[c]);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r * C + c] = as_floats(sum[r][c]);
}

using Weigh = void (*)(const int32_t*, size_t, const int32_t* const*, int, int, size_t, Floats*);

// By queries - 1, and panels of 16 channels: 1, 2, 4, 8; null: the sums would leave the registers.
#ifdef NF_AVX512
template <class Form>
static constexpr Weigh WEIGHS[MAX_QUERIES][4] = {
    {nullptr, weigh<Form, 1, 2>, weigh<Form, 1, 4>, weigh<Form, 1, 8>},
    {nullptr, weigh<Form, 2, 2>, weigh<Form, 2, 4>, weigh<Form, 2, 8>},
    {nullptr, weigh<Form, 3, 2>, weigh<Form, 3, 4>, nullptr},
    {nullptr, weigh<Form, 4, 2>, weigh<Form, 4, 4>, nullptr},
};
constexpr int WIDEST_WEIGH[MAX_QUERIES] = {3, 3, 2, 2};  // logarithms, by queries - 1
#else
template <class Form>
static constexpr Weigh WEIGHS[MAX_QUERIES][4] = {
    {nullptr, weigh<Form, 1, 2>, weigh<Form, 1, 4>, nullptr},
    {weigh<Form, 2, 1>, weigh<Form, 2, 2>, nullptr, nullptr},
    {weigh<Form, 3, 1>, nullptr, nullptr, nullptr},
    {weigh<Form, 4, 1>, nullptr, nullptr, nullptr},
};
constexpr int WIDEST_WEIGH[MAX_QUERIES] = {2, 1, 0, 0};
#endif

// space.scores of all queries and pages.
template <class Form>
static void score(const AttentionSpace& space, int count, int words, int num_pages) {
  Ints tiles[MAX_QUERIES * 8];
  for (int p = 0; p < num_pages;) {
    const int log_width = tile_width(count, num_pages - p), chunk = 1 << log_width;
    TILES<Form>[count - 1][log_width](space.queries, words, space.pages + p, PAGE, words, 0, tiles);
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < chunk; ++c)
        store_ints(space.scores + i * space.score_stride + (p + c) * PAGE, tiles[i * chunk + c]);
    p += chunk;
  }
}

// take(query, channel, 16 outputs) of all channels: weights x values over sums[query].
template <class Form, class Take>
static void weigh_all(const AttentionSpace& space, const float* sums, int count, int width,
                      int num_pages, Take take) {
  const size_t lda = space.score_stride / Form::DEPTH;
  for (int first = 0; first < width;) {
    int log_panels = WIDEST_WEIGH[count - 1];
    while (16 << log_panels > width - first) --log_panels;  // a head has an even number of panels
    const int panels = 1 << log_panels;
    Floats out[MAX_QUERIES * 4];
    WEIGHS<Form>[count - 1][log_panels](space.weights, lda, space.pages, num_pages, width,
                                            first, out);
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < panels; ++c)
        take(i, first + 16 * c, out[i * panels + c] / splat(sums[i]));
    first += panels * 16;
  }
}

#endif

// Scores to probabilities, not yet divided by their sum, which is returned. The keys first..last
// count, those of the pages around them get 0. Scores begin at key `begin`, a page's first.
template <class Form>
static float softmax(float* scores, int begin, int num_pages, int first, int last, float scale,
                     int32_t* weights) {
  const auto seen = [&](int page) {
    const int key = begin + page * PAGE;
    return bits(first - key, last - key + 1);
  };
  const Floats least = splat(-std::numeric_limits<float>::infinity());
  Floats most = least;
  for (int p = 0; p < num_pages; ++p)
    most = max(most, select(seen(p), load(scores + p * PAGE), least));
  const Floats top = splat(largest(most)), factor = splat(scale);
  Floats sum = splat(0.0f);
  for (int p = 0; p < num_pages; ++p) {
    const Floats below = load(scores + p * PAGE) - top;
    const Floats weight = select(seen(p), exp16(below * factor), splat(0.0f));
    sum = sum + weight;
    store16<Form>(weights, p * PAGE, weight);
  }
  return sum_of(sum);
}

struct Query {
  int position;
  int first;  // the key furthest left that it sees
  const int32_t* packed;
};

// take(query, channel, 16 outputs). keys(page) and values(page) are a head's blocks of that page.
template <class Form, class Keys, class Values, class Take>
static void attend(const AttentionSpace& space, const Query* queries, int count, int width,
                   float scale, Keys keys, Values values, Take take) {
  const int words = width / Form::DEPTH;
  int first_page = queries[0].first / PAGE, last_page = queries[0].position / PAGE;
  for (int i = 0; i < count; ++i) {
    first_page = std::min(first_page, queries[i].first / PAGE);
    last_page = std::max(last_page, queries[i].position / PAGE);
    std::memcpy(space.queries + i * words, queries[i].packed, sizeof(int32_t) * words);
  }
  const int num_pages = last_page - first_page + 1;
  for (int p = 0; p < num_pages; ++p) space.pages[p] = keys(first_page + p);
  score<Form>(space, count, words, num_pages);
  const size_t lda = space.score_stride / Form::DEPTH;
  float sums[MAX_QUERIES];
  for (int i = 0; i < count; ++i)
    sums[i] = softmax<Form>(space.scores + i * space.score_stride, first_page * PAGE, num_pages,
                            queries[i].first, queries[i].position, scale, space.weights + i * lda);
  for (int p = 0; p < num_pages; ++p) space.pages[p] = values(first_page + p);
  weigh_all<Form>(space, sums, count, width, num_pages, take);
}
