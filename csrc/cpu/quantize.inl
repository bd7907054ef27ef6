// Floats to 8 or 4 bits with a common scale: what stands for zero is in the middle of the range.
#pragma once

#include "simd.h"

namespace {

inline i32x16 nearest(f32x16 x) {
  return __builtin_convertvector(x + select(x < 0.f, splat(-0.5f), splat(0.5f)), i32x16);
}

inline i32x16 clamp(i32x16 x, int low, int high) {
  x = (x < low) ? splat_int(low) : x;
  return (x > high) ? splat_int(high) : x;
}

// `count` numbers (16 or 32) to bytes; returns the scale. Of some scales near the plain one, 4 bits take the one with the
// least squared error, large numbers counting more (as llama.cpp does it); 8 bits need no search.
float quantize_group(const float *x, int32_t count, int32_t is_half, uint8_t *out) {
  f32x16 v[2] = {load<f32x16>(x), count > 16 ? load<f32x16>(x + 16) : f32x16{}};
  f32x16 size = maximum(maximum(v[0], -v[0]), maximum(v[1], -v[1]));
  float most = largest(size), best_scale = 0, best_gain = -1;
  i32x16 best[2] = {};
  if (most > 0 && !is_half) {
    best_scale = most / 127.f;
    for (int i = 0; i < 2; i++) best[i] = clamp(nearest(v[i] * (127.f / most)), -127, 127);
  }
  if (most > 0 && is_half) {
    float signed_most = most;
    for (int i = 0; i < count; i++)
      if (x[i] == -most) signed_most = -most;
    for (int step = -6; step <= 6; step++) {
      float inverse = -(8.f + 0.15f * float(step)) / signed_most;
      f32x16 cross = {}, squares = {};
      i32x16 q[2];
      for (int i = 0; i < 2; i++) {
        q[i] = clamp(nearest(v[i] * inverse), -8, 7);
        f32x16 y = __builtin_convertvector(q[i], f32x16), weight = v[i] * v[i];
        cross += weight * v[i] * y;
        squares += weight * y * y;
      }
      float c = sum(cross), s = sum(squares);
      if (s > 0 && c * c > best_gain * s) {
        best_gain = c * c / s;
        best_scale = c / s;
        best[0] = q[0];
        best[1] = q[1];
      }
    }
  }
  for (int i = 0; i < count; i++) out[i] = uint8_t(best[i / 16][i % 16] + (is_half ? 8 : 128));
  return best_scale;
}

}  // namespace
