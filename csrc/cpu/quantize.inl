// Quantizes floats, 32 at a time, to 8 or 6 bits around an offset, or to 4 bits with a scale and a min.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

inline i32x16 nearest(f32x16 x) {
  return __builtin_convertvector(x + select(x < 0.f, splat(-0.5f), splat(0.5f)), i32x16);
}

inline i32x16 clamp(i32x16 x, int low, int high) {
  x = (x < low) ? splat_int(low) : x;
  return (x > high) ? splat_int(high) : x;
}

// Quantizes numbers to -high .. high, around an offset of high + 1.
inline void quantize_around(const f32x16 v[2], int high, i32x16 q[2], float &scale) {
  float most = largest(maximum(maximum(v[0], -v[0]), maximum(v[1], -v[1]))), steps = float(high);
  scale = most / steps;
  for (int i = 0; i < 2; i++) q[i] = clamp(nearest(v[i] * (most > 0 ? steps / most : 0.f)), -high, high) + high + 1;
}

// The scale and min with the least squared error, given which of 0 .. 15 each number becomes.
inline void fit_line(const f32x16 v[2], const i32x16 q[2], float count, float &scale, float &min) {
  f32x16 sv = v[0] + v[1], y[2] = {__builtin_convertvector(q[0], f32x16), __builtin_convertvector(q[1], f32x16)};
  float x = sum(sv), s = sum(y[0] + y[1]), ss = sum(y[0] * y[0] + y[1] * y[1]), sx = sum(y[0] * v[0] + y[1] * v[1]);
  float spread = count * ss - s * s;
  if (spread <= 0) return;
  scale = (count * sx - s * x) / spread;
  min = (x - scale * s) / count;
}

inline void choose(const f32x16 v[2], float scale, float min, i32x16 q[2]) {
  float inverse = scale > 0 ? 1.f / scale : 0.f;
  for (int i = 0; i < 2; i++) q[i] = clamp(nearest((v[i] - min) * inverse), 0, 15);
}

// Quantizes numbers to 4 bits: from smallest to largest, then twice: fit scale and min, and choose again.
inline void quantize_halves(const f32x16 v[2], i32x16 q[2], float &scale, float &min) {
  min = -largest(maximum(-v[0], -v[1]));
  scale = (largest(maximum(v[0], v[1])) - min) / 15.f;
  choose(v, scale, min, q);
  for (int round = 0; round < 2; round++) {
    float better_scale = scale, better_min = min;
    fit_line(v, q, 32, better_scale, better_min);
    i32x16 again[2];
    choose(v, better_scale, better_min, again);
    f32x16 before = {}, after = {};
    for (int i = 0; i < 2; i++) {
      f32x16 old = __builtin_convertvector(q[i], f32x16) * scale + min - v[i];
      f32x16 fresh = __builtin_convertvector(again[i], f32x16) * better_scale + better_min - v[i];
      before += old * old;
      after += fresh * fresh;
    }
    if (sum(after) >= sum(before)) return;
    scale = better_scale, min = better_min, q[0] = again[0], q[1] = again[1];
  }
}

// Quantizes 32 numbers: number = (byte - offset) * scale + min, where one of offset and min is 0.
void quantize_group(const float *x, int32_t kind, uint8_t *out, float *scale, float *min) {
  f32x16 v[2] = {load<f32x16>(x), load<f32x16>(x + 16)};
  i32x16 q[2];
  *min = 0;
  if (kind == kvasir::Q4) {
    quantize_halves(v, q, *scale, *min);
  } else {
    quantize_around(v, kind == kvasir::Q6 ? 31 : 127, q, *scale);
  }
  for (int i = 0; i < 32; i++) out[i] = uint8_t(q[i / 16][i % 16]);
}

}  // namespace
