// Norms, activations, rotation and the store of keys and values. Roundings are those of kernels/reference.py.
#pragma once

#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace {

using kvasir::Cache;
using kvasir::Norm;
using kvasir::StoreToken;

inline f32x16 activate(f32x16 x, int kind) {
  switch (kind) {
    case kvasir::SILU: return x / (1.f + exponential(-x));
    case kvasir::GELU: return 0.5f * x * (1.f + error_function(x * 0.70710678f));
    case kvasir::GELU_TANH: return 0.5f * x * (1.f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return maximum(x, f32x16{});
  }
}

inline f32x16 gated_value(f32x16 gate, f32x16 up, int activation) {
  return round_bf16(activate(round_bf16(gate), activation)) * round_bf16(up);
}

// The last numbers of a row are computed in a copy of width sixteen.
template <class F>
inline void for_each_16(int size, F f) {
  int at = 0;
  for (; at + 16 <= size; at += 16) f(at, 16);
  if (at < size) f(at, size - at);
}

inline f32x16 load_some(const uint16_t *p, int count) {
  if (count == 16) return load_bf16(p);
  uint16_t copy[16] = {};
  memcpy(copy, p, 2 * size_t(count));
  return load_bf16(copy);
}

inline f32x16 load_some(const float *p, int count) {
  if (count == 16) return load<f32x16>(p);
  f32x16 v = {};
  memcpy(&v, p, 4 * size_t(count));
  return v;
}

inline void store_some(uint16_t *p, f32x16 v, int count) {
  if (count == 16) return store_bf16(p, v);
  uint16_t copy[16];
  store_bf16(copy, v);
  memcpy(p, copy, 2 * size_t(count));
}

void normalise(const Norm *norm, const uint16_t *x, uint16_t *out, int size) {
  float mean = 0, squares = 0;
  if (norm->kind == 3) {
    f32x16 total = {};
    for_each_16(size, [&](int at, int n) { total += load_some(x + at, n); });
    mean = sum(total) / float(size);
  }
  f32x16 total = {};
  for_each_16(size, [&](int at, int n) {
    f32x16 v = load_some(x + at, n) - mean;
    if (n < 16)
      for (int i = n; i < 16; i++) v[i] = 0;
    total += v * v;
  });
  squares = sum(total);
  float factor = 1.f / sqrtf(squares / float(size) + norm->eps);
  for_each_16(size, [&](int at, int n) {
    f32x16 v = (load_some(x + at, n) - mean) * factor;
    if (norm->kind == 1) v = round_bf16(v);
    v = v * (norm->kind == 2 ? load_some((const float *)norm->gain + at, n)
                             : load_some((const uint16_t *)norm->gain + at, n));
    if (norm->bias) v += load_some(norm->bias + at, n);
    store_some(out + at, v, n);
  });
}

void add_rows(const uint16_t *x, const uint16_t *y, uint16_t *out, int32_t size) {
  for_each_16(size, [&](int at, int n) { store_some(out + at, load_some(x + at, n) + load_some(y + at, n), n); });
}

// residual = x (+ residual), out = its norm; without a norm, itself.
void add_norm(const Norm *norm, const uint16_t *x, uint16_t *residual, int32_t has_residual, uint16_t *out,
              int32_t size) {
  if (has_residual) {
    add_rows(x, residual, residual, size);
  } else {
    memcpy(residual, x, 2 * size_t(size));
  }
  if (norm->kind == 0) {
    memcpy(out, residual, 2 * size_t(size));
  } else {
    normalise(norm, residual, out, size);
  }
}

void scale_row(uint16_t *x, float scale, int32_t size) {
  for_each_16(size, [&](int at, int n) { store_some(x + at, load_some(x + at, n) * scale, n); });
}

void gated_row(const uint16_t *x, uint16_t *out, int32_t size, int32_t activation) {
  for_each_16(size, [&](int at, int n) {
    store_some(out + at, gated_value(load_some(x + at, n), load_some(x + size + at, n), activation), n);
  });
}

void activate_row(uint16_t *x, int32_t size, int32_t activation) {
  for_each_16(size, [&](int at, int n) { store_some(x + at, activate(load_some(x + at, n), activation), n); });
}

// gate * sigmoid(alpha * gate) * (up + 1), the gate at most `limit`, up between -limit and limit
void clamped_row(const uint16_t *x, uint16_t *out, int32_t size, float alpha, float limit) {
  for_each_16(size, [&](int at, int n) {  // in these orders a NaN stays one
    f32x16 gate = minimum(splat(limit), load_some(x + at, n));
    f32x16 up = maximum(splat(-limit), minimum(splat(limit), load_some(x + size + at, n)));
    store_some(out + at, gate / (1.f + exponential(-alpha * gate)) * (up + 1.f), n);
  });
}

// ---------------------------------------------------------------- rotation and store

inline void rotate_pair(uint16_t *left, uint16_t *right, float cosine, float sine) {
  float c = round_bf16(cosine), s = round_bf16(sine), l = from_bf16(*left), r = from_bf16(*right);
  *left = to_bf16(round_bf16(l * c) - round_bf16(r * s));
  *right = to_bf16(round_bf16(r * c) + round_bf16(l * s));
}

void rotate(uint16_t *head, const float *angles, int size, bool interleaved) {
  int half = size / 2, i = 0;
  if (interleaved) {
    for (; i < half; i++) rotate_pair(head + 2 * i, head + 2 * i + 1, angles[i], angles[half + i]);
    return;
  }
  for (; i + 16 <= half; i += 16) {
    f32x16 c = round_bf16(load<f32x16>(angles + i)), s = round_bf16(load<f32x16>(angles + half + i));
    f32x16 left = load_bf16(head + i), right = load_bf16(head + half + i);
    store_bf16(head + i, round_bf16(left * c) - round_bf16(right * s));
    store_bf16(head + half + i, round_bf16(right * c) + round_bf16(left * s));
  }
  for (; i < half; i++) rotate_pair(head + i, head + half + i, angles[i], angles[half + i]);
}

// Stores a vector in the cache, in an 8-bit cache as 8-bit numbers followed by their scale.
void store_vector(const Cache &cache, int64_t at, const uint16_t *v, int size) {
  if (!cache.is_int8) {
    memcpy((uint16_t *)cache.data + at, v, 2 * size_t(size));
    return;
  }
  int8_t *out = (int8_t *)cache.data + at;
  float most = 0;
  for (int i = 0; i < size; i++) most = fmaxf(most, fabsf(from_bf16(v[i])));
  float inverse = most > 0 ? 127.f / most : 0.f, scale = most / 127.f;
  for (int i = 0; i < size; i++) out[i] = int8_t(lrintf(from_bf16(v[i]) * inverse));
  memcpy(out + size, &scale, 4);
}

void store_token(const StoreToken *t) {
  int d = t->head_dim;
  const float *angles = t->rotation.table ? t->rotation.table + t->position * t->rotation.size : nullptr;
  for (int h = 0; h < t->heads + t->kv_heads; h++) {
    uint16_t *head = t->qkv + size_t(h) * d;
    const Norm *norm = h < t->heads ? t->q_norm : t->k_norm;
    if (norm && norm->kind) normalise(norm, head, head, d);
    if (angles) rotate(head, angles, t->rotation.size, t->rotation.interleaved);
  }
  if (t->slot < 0) return;
  const Cache &c = t->cache;
  int64_t at = t->slot / c.block_size * c.block_stride + t->slot % c.block_size * c.token_stride;
  for (int h = 0; h < t->kv_heads; h++) {
    const uint16_t *key = t->qkv + size_t(t->heads + h) * d;
    store_vector(c, at + h * c.head_stride, key, d);
    store_vector(c, at + h * c.head_stride + c.value_offset, key + size_t(t->kv_heads) * d, d);
  }
}

}  // namespace
