// Passes over rows of floats of which torch makes several each: norms, rotary positions, relu^2, the
// weighted residual. A row is computed by one thread, a sum is kept in 16 parts on every processor.
#pragma once

#include <cmath>

#include "products.h"

static float dot(const float* a, const float* b, int64_t count) {
  constexpr int PARTS = 16 / LANES;
  Vec sum[PARTS] = {};
  float part[16];
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int p = 0; p < PARTS; ++p)
      sum[p] += load(a + i + p * LANES) * load(b + i + p * LANES);
  std::memcpy(part, sum, sizeof part);
  for (; i < count; ++i) part[i % 16] += a[i] * b[i];
  for (int half = 8; half; half /= 2)
    for (int j = 0; j < half; ++j) part[j] += part[j + half];
  return part[0];
}

// y = factor x with factor = scale / sqrt(mean(x^2) + eps), which is returned; y may be x.
static float normalise(const float* x, int64_t width, float eps, float scale, float* y) {
  const float factor = scale / std::sqrt(dot(x, x, width) / width + eps);
  for (int64_t i = 0; i < width; ++i) y[i] = factor * x[i];
  return factor;
}

// The gradient of x, from y = factor x and its gradient: factor (g - y mean(g y) / scale^2).
static void normalise_grad(const float* y, const float* grad, int64_t width, float factor,
                           float scale, float* to) {
  const float along = dot(grad, y, width) / width / (scale * scale);
  for (int64_t i = 0; i < width; ++i) to[i] = factor * (grad[i] - along * y[i]);
}

// Channel j is paired with channel j + half; see `rotate` of model/layers.py. `to` is not `x`.
static void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* to) {
  for (int64_t j = 0; j < half; ++j) {
    to[j] = x[j] * cos[j] + x[j + half] * sin[j];
    to[j + half] = x[j + half] * cos[j] - x[j] * sin[j];
  }
}

// Turns the gradient of `rotate`'s result into that of x, in place.
static void rotate_back(float* grad, const float* cos, const float* sin, int64_t half) {
  for (int64_t j = 0; j < half; ++j) {
    const float a = grad[j], b = grad[j + half];
    grad[j] = a * cos[j] - b * sin[j];
    grad[j + half] = a * sin[j] + b * cos[j];
  }
}

// Of `count` elements, NaN for NaN. By vectors: compilers leave a scalar comparison, which may trap,
// a branch.
static void relu_square(const float* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec value = load(x + i);
    store(y + i, value <= 0.0f ? Vec{} : value * value);
  }
  for (; i < count; ++i) y[i] = x[i] <= 0 ? 0 : x[i] * x[i];
}

static void relu_square_grad(const float* x, const float* grad, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec value = load(x + i);
    store(to + i, value <= 0.0f ? Vec{} : 2 * value * load(grad + i));
  }
  for (; i < count; ++i) to[i] = x[i] <= 0 ? 0 : 2 * x[i] * grad[i];
}
