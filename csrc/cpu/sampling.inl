// Scans of the vocabulary: the best token, and sums of probabilities. Logits are float32 or bfloat16.
#pragma once

#include "kernels.h"
#include "pointwise.inl"
#include "simd.h"

namespace {

inline float value_at(const uint16_t *p) { return from_bf16(*p); }
inline float value_at(const float *p) { return *p; }

// Returns the first of the largest logits. NaN is never chosen.
template <class T>
int32_t find_best(const T *logits, int32_t size) {
  f32x16 high = splat(-INFINITY);
  for_each_16(size, [&](int at, int n) {
    f32x16 v = load_some(logits + at, n);
    for (int i = n; i < 16; i++) v[i] = -INFINITY;
    high = maximum(v, high);
  });
  float most = largest(high);
  int32_t at = 0;
  while (at + 16 <= size && !any(load_some(logits + at, 16) == most)) at += 16;
  for (; at < size; at++)
    if (value_at(logits + at) == most) return at;
  return 0;
}

template <class T>
double find_mass(const T *logits, int32_t size, float best, float scale) {
  double total = 0;
  for (int32_t at = 0; at < size; at += 4096) {  // sums of some thousand floats are exact enough
    int32_t here = size - at < 4096 ? size - at : 4096;
    f32x16 sums = {};
    for_each_16(here, [&](int i, int n) {
      f32x16 w = exponential((load_some(logits + at + i, n) - best) * scale);
      for (int j = n; j < 16; j++) w[j] = 0;
      sums += w;
    });
    total += double(sum(sums));
  }
  return total;
}

template <class T>
kvasir::Reach find_reach(const T *logits, int32_t size, float best, float scale, float depth, float below,
                         float *out, int32_t room) {
  kvasir::Reach found{0, 0, INFINITY};
  f32x16 lowest = splat(INFINITY);
  int32_t written = 0;
  for (int32_t at = 0; at < size; at += 4096) {
    int32_t here = size - at < 4096 ? size - at : 4096;
    f32x16 sums = {};
    i32x16 counts = {};
    for_each_16(here, [&](int i, int n) {
      f32x16 v = load_some(logits + at + i, n), scaled = (v - best) * scale;
      i32x16 inside = (scaled >= depth) & (scaled < below);
      for (int j = n; j < 16; j++) inside[j] = 0;
      if (!any(inside)) return;
      sums += select(inside, exponential(scaled), f32x16{});
      counts -= inside;
      lowest = minimum(select(inside, v, splat(INFINITY)), lowest);
      for (int j = 0; j < n && written < room; j++)
        if (inside[j]) out[written++] = v[j];
    });
    found.mass += double(sum(sums));
    for (int j = 0; j < 16; j++) found.count += counts[j];
  }
  for (int j = 0; j < 16; j++) found.lowest = lowest[j] < found.lowest ? lowest[j] : found.lowest;
  return found;
}

int32_t best_logit(const void *logits, int32_t is_float, int32_t size) {
  return is_float ? find_best((const float *)logits, size) : find_best((const uint16_t *)logits, size);
}

kvasir::Reach reach_of(const void *logits, int32_t is_float, int32_t size, float best, float scale, float depth,
                       float below, float *out, int32_t room) {
  return is_float ? find_reach((const float *)logits, size, best, scale, depth, below, out, room)
                  : find_reach((const uint16_t *)logits, size, best, scale, depth, below, out, room);
}

double mass_of(const void *logits, int32_t is_float, int32_t size, float best, float scale) {
  return is_float ? find_mass((const float *)logits, size, best, scale)
                  : find_mass((const uint16_t *)logits, size, best, scale);
}

}  // namespace
