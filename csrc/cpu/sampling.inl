// Scans of the vocabulary: the best token, the drawn one, and sums of probabilities. Logits are float32 or bfloat16.
#pragma once

#include <math.h>

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

inline u32x16 mix(u32x16 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Minus the logarithm of an exponentially distributed number, from the token's 32 bits.
inline double gumbel(uint32_t hashed) { return -log(-log1p(-(double(hashed) + 0.5) * 0x1p-32)); }

// Returns the first token with the largest logit + heat * noise. Few logarithms are taken: the bits of a float, read as an
// integer, are its logarithm to within 0.09 and never above it, so they say which tokens cannot be better than the best so
// far.
template <class T>
int32_t find_drawn(const T *logits, int32_t size, float heat, const kvasir::Noise &noise) {
  constexpr float LN_2 = 0.69314718f, SLACK = 1e-3f;
  u32x16 token = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t found = 0;
  double most = -INFINITY;
  for_each_16(size, [&](int at, int n) {
    f32x16 v = load_some(logits + at, n);
    u32x16 hashed = mix((((token + uint32_t(at)) * noise.step) ^ noise.flip) + noise.shift);
    i32x16 log2 = bits<i32x16>(__builtin_convertvector(hashed, f32x16));
    f32x16 bound = v + heat * ((159.f - __builtin_convertvector(log2, f32x16) * 0x1p-23f) * LN_2 + SLACK);
    i32x16 likely = (bound >= float(most)) & (bound > -INFINITY);
    if (!any(likely)) return;
    for (int i = 0; i < n; i++) {
      if (!likely[i]) continue;
      double score = double(v[i]) + double(heat) * gumbel(hashed[i]);
      if (score > most) most = score, found = at + i;
    }
  });
  return found;
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

int32_t drawn_token(const void *logits, int32_t is_float, int32_t size, float heat, const kvasir::Noise &noise) {
  return is_float ? find_drawn((const float *)logits, size, heat, noise)
                  : find_drawn((const uint16_t *)logits, size, heat, noise);
}

}  // namespace
