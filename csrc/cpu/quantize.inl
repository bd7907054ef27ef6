// Quantizes floats, 32 at a time, to 8 or 6 bits around an offset, or to 4 bits with a scale and a min.
#pragma once

#include <math.h>

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

// The scale and min with the least squared error, given which of 0 .. 15 each number becomes. Errors count by `w`.
inline void fit_line(const f32x16 v[2], const f32x16 w[2], const i32x16 q[2], float &scale, float &min) {
  f32x16 y[2] = {__builtin_convertvector(q[0], f32x16), __builtin_convertvector(q[1], f32x16)};
  f32x16 wy[2] = {w[0] * y[0], w[1] * y[1]};
  float count = sum(w[0] + w[1]), x = sum(w[0] * v[0] + w[1] * v[1]), s = sum(wy[0] + wy[1]);
  float ss = sum(wy[0] * y[0] + wy[1] * y[1]), sx = sum(wy[0] * v[0] + wy[1] * v[1]);
  float spread = count * ss - s * s;
  if (spread <= 0) return;
  scale = (count * sx - s * x) / spread;
  min = (x - scale * s) / count;
}

inline void choose(const f32x16 v[2], float scale, float min, i32x16 q[2]) {
  float inverse = scale > 0 ? 1.f / scale : 0.f;
  for (int i = 0; i < 2; i++) q[i] = clamp(nearest((v[i] - min) * inverse), 0, 15);
}

// The squared error of numbers that have become 0 .. 15, by `w`.
inline float squared_error(const f32x16 v[2], const f32x16 w[2], const i32x16 q[2], float scale, float min) {
  f32x16 total = {};
  for (int i = 0; i < 2; i++) {
    f32x16 off = __builtin_convertvector(q[i], f32x16) * scale + min - v[i];
    total += w[i] * off * off;
  }
  return sum(total);
}

// Quantizes numbers to 4 bits. The range from smallest to largest is tried, and shorter ones around the same middle,
// which lose their ends and gain in between; each is fitted twice to the numbers it gives. The best is kept. Large numbers
// count more than small ones, because they matter more to the products.
inline void quantize_halves(const f32x16 v[2], i32x16 q[2], float &scale, float &min) {
  constexpr float SHRINKS[] = {1.f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
  float usual = sqrtf(sum(v[0] * v[0] + v[1] * v[1]) / 32.f);
  usual = usual > 0 ? usual : 1.f;
  f32x16 w[2] = {maximum(v[0], -v[0]) / usual + 1.f, maximum(v[1], -v[1]) / usual + 1.f};
  float low = -largest(maximum(-v[0], -v[1])), high = largest(maximum(v[0], v[1])), least = 0;
  for (float shrink : SHRINKS) {
    float new_scale = (high - low) * shrink / 15.f, new_min = (low + high) / 2 - new_scale * 7.5f;
    if (shrink == 1.f) new_min = low;
    i32x16 chosen[2];
    choose(v, new_scale, new_min, chosen);
    for (int round = 0; round < 2; round++) {
      fit_line(v, w, chosen, new_scale, new_min);
      choose(v, new_scale, new_min, chosen);
    }
    float error = squared_error(v, w, chosen, new_scale, new_min);
    if (shrink != 1.f && error >= least) continue;
    least = error, scale = new_scale, min = new_min, q[0] = chosen[0], q[1] = chosen[1];
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
