// From a row of logits to the next token: what engine/sampling.py's `sample` does, for one row.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels_simd.h"

struct SamplingRule {
  float temperature;  // 0: the likeliest token
  int32_t top_k;      // 0 and below: all
  int64_t key;        // the row's random stream
};

struct Candidate {
  float logit;
  int32_t token;
};

struct SamplingSpace {
  std::vector<float> peaks, order;
  std::vector<int64_t> sums;
  std::vector<Candidate> candidates;
};

constexpr int SAMPLE_BLOCK = 64;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

// SplitMix64's finaliser, as sampling.py has it.
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The row's number for the token at `position`, in units of 2^-23.
static inline int64_t uniform(uint64_t key, uint64_t position) {
  return static_cast<int64_t>(mix(key + (position + 1) * GOLDEN) >> 41);
}

static inline float softcap(float x, float cap) {
  return first_of(softcap16(splat(x), cap));
}

static inline float exponential(float x) {
  return first_of(exp16(splat(x)));
}

constexpr float LARGEST = std::numeric_limits<float>::max();

// As sampling.py's `_finite`: NaN counts as the least logit.
static inline float finite(float x) {
  return x == x ? std::clamp(x, -LARGEST, LARGEST) : -LARGEST;
}

// The 16 logits from `at` on, finite; beyond the vocabulary -infinity.
static inline Floats logits16(const float* logits, int at, int vocab) {
  const Mask mask = bits(0, vocab - at);
  const Floats least = splat(-std::numeric_limits<float>::infinity());
  const Floats x = load_some(mask, logits + at, least);
  // Of a NaN, max gives its second operand.
  const Floats above = select(mask, max(x, splat(-LARGEST)), x);
  return min(above, splat(LARGEST));
}

// All logits from `least` on, in the order of tokens.
static void collect(const float* logits, int vocab, float least, SamplingSpace& space) {
  space.candidates.clear();
  for (int block = 0; block * SAMPLE_BLOCK < vocab; ++block) {
    if (space.peaks[block] < least) continue;
    for (int at = block * SAMPLE_BLOCK; at < std::min(vocab, (block + 1) * SAMPLE_BLOCK); at += 16) {
      const Floats x = logits16(logits, at, vocab);
      unsigned mask = at_least(x, splat(least));
      for (; mask; mask &= mask - 1) {
        const int token = at + __builtin_ctz(mask);
        if (token < vocab) space.candidates.push_back({finite(logits[token]), token});
      }
    }
  }
}

static float kth_largest(std::vector<float>& values, int k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  return values[k - 1];
}

// How far below x a logit may be and yet round, capped, to as much. The cap grows with the slope
// 1 / cosh^2, its rounding is a few units in the last place of `cap`.
static float margin(float x, float cap) {
  const double slope = std::cosh(std::min(std::fabs(x) / cap, 40.0f));
  return static_cast<float>(1e-6 * cap * slope * slope);
}

// The k likeliest, likeliest first, the lowest token of equals. A cap of 0: logits are capped.
// Capping keeps the order but for rounding, so only those that may be among the k are capped.
static void likeliest(const float* logits, int vocab, int k, float cap, SamplingSpace& space) {
  space.peaks.clear();
  for (int start = 0; start < vocab; start += SAMPLE_BLOCK) {
    Floats most = logits16(logits, start, vocab);
    for (int at = start + 16; at < std::min(vocab, start + SAMPLE_BLOCK); at += 16)
      most = max(most, logits16(logits, at, vocab));
    space.peaks.push_back(largest(most));
  }
  float least = -std::numeric_limits<float>::infinity();
  if (k <= static_cast<int>(space.peaks.size())) {
    space.order = space.peaks;  // k blocks have a peak this high, so k logits have
    least = kth_largest(space.order, k);
  }
  collect(logits, vocab, least, space);
  if (cap > 0.0f) {
    space.order.clear();
    for (const Candidate& c : space.candidates) space.order.push_back(c.logit);
    const float kth = kth_largest(space.order, k), lower = kth - margin(kth, cap);
    if (lower < least) collect(logits, vocab, lower, space);
    for (Candidate& c : space.candidates)
      c.logit = c.logit < lower ? -HUGE_VALF : softcap(c.logit, cap);
  }
  std::partial_sort(space.candidates.begin(), space.candidates.begin() + k, space.candidates.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
                    });
}

// Weights, from 0 to 1, are counted in units of 2^-31, so that sums are exact in any order.
static inline int64_t units(float weight) { return static_cast<int64_t>(weight * 0x1p31f); }

// number x total / 2^23, rounded down; the product alone would not fit 64 bits.
static inline int64_t share(int64_t number, int64_t total) {
  return (total >> 23) * number + ((total & 0x7FFFFF) * number >> 23);
}

// A token in proportion to its weight, tokens in their order: the first whose cumulative weight is
// above the row's number x all.
static int sample_from_all(const float* logits, int vocab, const SamplingRule& rule, float cap,
                           int64_t number) {
  const auto capped = [&](int at) {
    const Floats x = logits16(logits, at, vocab);
    return cap > 0.0f ? softcap16(x, cap) : x;
  };
  Floats most = splat(-std::numeric_limits<float>::infinity());
  for (int at = 0; at < vocab; at += 16) most = max(most, logits16(logits, at, vocab));
  const float peak = largest(most);
  const Floats top = splat(cap > 0.0f ? softcap(peak, cap) : peak);
  const Floats temperature = splat(rule.temperature);
  const auto weigh = [&](int at) {
    const Floats w = exp16((capped(at) - top) / temperature);
    return select(bits(0, vocab - at), w, splat(0.0f));
  };
  int64_t total = 0;
  thread_local std::vector<int64_t> before;  // the cumulative weight before each 16 tokens
  before.clear();
  for (int at = 0; at < vocab; at += 16) {
    before.push_back(total);
    total += sum_of_integers(weigh(at) * splat(0x1p31f));
  }
  const int64_t threshold = share(number, total);
  const auto after = std::upper_bound(before.begin(), before.end(), threshold);
  const size_t group = after - before.begin() - 1;  // the last to begin at or below the threshold
  alignas(64) float weights[16];
  store(weights, weigh(static_cast<int>(group) * 16));
  int64_t sum = before[group];
  int i = 0;
  while (i < 15 && (sum += units(weights[i])) <= threshold) ++i;
  return static_cast<int>(group) * 16 + i;
}

// The token that comes at `position`. A cap of 0: the logits are capped already.
static int sample(const float* logits, int vocab, const SamplingRule& rule, int position, float cap,
                SamplingSpace& space) {
  const int64_t number =
      uniform(static_cast<uint64_t>(rule.key), static_cast<uint64_t>(position));
  const bool greedy = rule.temperature == 0.0f;
  if (!greedy && (rule.top_k <= 0 || rule.top_k >= vocab))
    return sample_from_all(logits, vocab, rule, cap, number);
  const int k = greedy ? 1 : rule.top_k;
  likeliest(logits, vocab, k, cap, space);
  if (greedy) return space.candidates[0].token;
  int64_t sum = 0;
  space.sums.clear();
  for (int i = 0; i < k; ++i) {
    const float below = space.candidates[i].logit - space.candidates[0].logit;
    space.sums.push_back(sum += units(exponential(below / rule.temperature)));
  }
  const int64_t threshold = share(number, sum);
  const auto chosen = std::upper_bound(space.sums.begin(), space.sums.end(), threshold);
  return space.candidates[chosen - space.sums.begin()].token;
}
