// Vectors of sixteen numbers for any instruction set: GCC and Clang compile them for the instruction set of the file that
// includes this. Everything is in an unnamed namespace, because each such file gets its own version.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
inline V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void *p, V v) {
  memcpy(p, &v, sizeof v);
}

inline f32x16 splat(float x) { return f32x16{} + x; }
inline i32x16 splat_int(int32_t x) { return i32x16{} + x; }

// ---------------------------------------------------------------- bfloat16 and float16

inline float from_bf16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

inline uint16_t to_bf16(float x) {
  uint32_t u = bits<uint32_t>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 64);  // NaN stays NaN
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }

inline float from_f16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return bits<float>(sign | 0x7f800000 | (fraction << 13));
  if (exponent == 0) {
    float tiny = float(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return bits<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

inline f32x16 load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
#elif defined(__AVX2__)
  __m256i halves[2];
  for (int i = 0; i < 2; i++)
    halves[i] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8 * i))), 16);
  return load<f32x16>(halves);
#else
  return bits<f32x16>(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
#endif
}

inline void store_bf16(uint16_t *p, f32x16 x) {
#if defined(__AVX512BF16__)
  store(p, _mm512_cvtneps_pbh(bits<__m512>(x)));
#else
  u32x16 u = bits<u32x16>(x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u32x16 no_number = (u32x16)((u & 0x7fffffff) > 0x7f800000);
  u = (no_number & ((u >> 16) | 64)) | (~no_number & rounded);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(bits<__m512i>(u)));
#elif defined(__AVX2__)
  __m256i low = load<__m256i>(&u), high = load<__m256i>((const char *)&u + 32);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#else
  store(p, __builtin_convertvector(u, u16x16));
#endif
#endif
}

inline f32x16 load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)));
#elif defined(__F16C__)
  __m256 halves[2];
  for (int i = 0; i < 2; i++) halves[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * i)));
  return load<f32x16>(halves);
#else
  f32x16 v;
  for (int i = 0; i < 16; i++) v[i] = from_f16(p[i]);
  return v;
#endif
}

inline f32x16 round_bf16(f32x16 x) {
  u32x16 u = bits<u32x16>(x);
  return bits<f32x16>((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}

// ---------------------------------------------------------------- 16 by 16

// out[j] is number `at` + j of all rows.
inline void transpose16(const uint32_t *const rows[16], size_t at, u32x16 out[16]) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + at);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {  // r[4 g + j] has columns j, j + 4, j + 8, j + 12 of rows 4 g .. 4 g + 3
    __m512i a = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), b = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88);
    __m512i c = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd), d = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
    out[j] = bits<u32x16>(_mm512_shuffle_i32x4(a, b, 0x88));
    out[j + 8] = bits<u32x16>(_mm512_shuffle_i32x4(a, b, 0xdd));
    out[j + 4] = bits<u32x16>(_mm512_shuffle_i32x4(c, d, 0x88));
    out[j + 12] = bits<u32x16>(_mm512_shuffle_i32x4(c, d, 0xdd));
  }
#else
  for (int j = 0; j < 16; j++)
    for (int i = 0; i < 16; i++) out[j][i] = load<uint32_t>(rows[i] + at + j);
#endif
}

// The first `count` of 16, or all.
inline void store_first(uint32_t *p, u32x16 x, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi32(p, count < 16 ? __mmask16((1 << count) - 1) : __mmask16(0xffff), bits<__m512i>(x));
#else
  memcpy(p, &x, count < 16 ? 4 * size_t(count) : 64);
#endif
}

// ---------------------------------------------------------------- functions

inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return bits<f32x16>((mask & bits<i32x16>(yes)) | (~mask & bits<i32x16>(no)));
}
#if defined(__AVX512F__)
inline f32x16 maximum(f32x16 a, f32x16 b) { return bits<f32x16>(_mm512_max_ps(bits<__m512>(a), bits<__m512>(b))); }
inline f32x16 minimum(f32x16 a, f32x16 b) { return bits<f32x16>(_mm512_min_ps(bits<__m512>(a), bits<__m512>(b))); }
#else
inline f32x16 maximum(f32x16 a, f32x16 b) { return select(a > b, a, b); }
inline f32x16 minimum(f32x16 a, f32x16 b) { return select(a < b, a, b); }
#endif

inline bool any(i32x16 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bits<__m512i>(mask), bits<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  __m256i low = load<__m256i>(&mask), high = load<__m256i>((const char *)&mask + 32);
  return _mm256_movemask_epi8(_mm256_or_si256(low, high)) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < 16; i++) found |= mask[i];
  return found != 0;
#endif
}

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bits<__m512>(v));
#endif
  float s = 0;
  for (int i = 0; i < 8; i++) s += v[i] + v[i + 8];
  return s;
}
inline float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits<__m512>(v));
#endif
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// e^x to about one unit in the last place; 0 below -87, where float32 has no normal numbers; NaN stays NaN.
inline f32x16 exponential(f32x16 x) {
  f32x16 clamped = maximum(splat(-87.f), minimum(splat(88.f), x));  // in this order both return x if it is NaN
  f32x16 turns = clamped * 1.44269504f;
  f32x16 half = select(turns < 0.f, splat(-0.5f), splat(0.5f));
  i32x16 n = __builtin_convertvector(turns + half, i32x16);
  f32x16 whole = __builtin_convertvector(n, f32x16);
  f32x16 r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  f32x16 y = p * bits<f32x16>((n + 127) << 23);
  return select(x < -87.f, f32x16{}, y);
}

inline f32x16 hyperbolic_tangent(f32x16 x) { return 1.f - 2.f / (exponential(2.f * x) + 1.f); }

// The error function, to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline f32x16 error_function(f32x16 x) {
  i32x16 negative = x < 0.f;
  f32x16 a = select(negative, -x, x), t = 1.f / (1.f + 0.3275911f * a);
  f32x16 p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  f32x16 y = 1.f - p * exponential(-a * a);
  return select(negative, -y, y);
}

}  // namespace
