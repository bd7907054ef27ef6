// Matrix products over packed weights: rows of activations times blocks of 16 outputs. See kernels.h for the layouts.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "pointwise.inl"
#include "simd.h"

namespace {

using kvasir::Matrix;
using kvasir::Product;
using kvasir::Rows;

#if defined(__AVX512BF16__)
// Accumulators that fit into 32 registers. Over two blocks an activation is read once for both.
constexpr int MOST_ROWS = 28, WIDE_ROWS = 14, FEW_ROWS = 4, QUANT_ROWS = 12, WIDE_QUANT_ROWS = 6;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, WIDE_ROWS = 2, FEW_ROWS = 1, QUANT_ROWS = 2, WIDE_QUANT_ROWS = 1;
#else
constexpr int MOST_ROWS = 4, WIDE_ROWS = 2, FEW_ROWS = 1, QUANT_ROWS = 4, WIDE_QUANT_ROWS = 2;
#endif

// ---------------------------------------------------------------- bfloat16

#if defined(__AVX512BF16__)
typedef __m512bh Pairs;
typedef f32x16 Sums;
inline void store_sums(float *out, Sums sums) { store(out, sums); }
inline Pairs load_pairs(const uint32_t *w) { return (__m512bh)_mm512_loadu_si512(w); }
inline void dot(f32x16 &acc, uint32_t a, Pairs w) {
  acc = bits<f32x16>(_mm512_dpbf16_ps(bits<__m512>(acc), w, (__m512bh)_mm512_set1_epi32(int(a))));
}
#elif defined(__AVX2__)
struct Pairs {
  __m256 even[2], odd[2];
};
struct Sums {
  __m256 half[2];
};
inline void store_sums(float *out, const Sums &sums) {
  for (int h = 0; h < 2; h++) _mm256_storeu_ps(out + 8 * h, sums.half[h]);
}
inline Pairs load_pairs(const uint32_t *w) {
  Pairs pairs;
  for (int h = 0; h < 2; h++) {
    __m256i both = _mm256_loadu_si256((const __m256i *)(w + 8 * h));
    pairs.even[h] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    pairs.odd[h] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))));
  }
  return pairs;
}
inline void dot(Sums &acc, uint32_t a, const Pairs &w) {
  __m256 even = _mm256_set1_ps(bits<float>(a << 16)), odd = _mm256_set1_ps(bits<float>(a & 0xffff0000u));
  for (int h = 0; h < 2; h++) {
    acc.half[h] = _mm256_fmadd_ps(w.even[h], even, acc.half[h]);
    acc.half[h] = _mm256_fmadd_ps(w.odd[h], odd, acc.half[h]);
  }
}
#else
struct Pairs {
  f32x16 even, odd;
};
typedef f32x16 Sums;
inline void store_sums(float *out, Sums sums) { store(out, sums); }
inline Pairs load_pairs(const uint32_t *w) {
  u32x16 both = load<u32x16>(w);
  return {bits<f32x16>(both << 16), bits<f32x16>(both & 0xffff0000u)};
}
inline void dot(f32x16 &acc, uint32_t a, const Pairs &w) {
  acc += w.even * bits<float>(a << 16);
  acc += w.odd * bits<float>(a & 0xffff0000u);
}
#endif

// Zeros, in registers: for an initializer the compiler would fill memory and read it.
template <int R, int B, typename T>
inline void clear(T (&sums)[R][B]) {
#pragma GCC unroll 28
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) sums[i][b] = T{};
}

// Where the blocks of a tile lie: block b is at (b % 2) * near + (b / 2) * far.
struct Spread {
  size_t near, far;
};

// R rows times B blocks: out[R][B][16]. Pair p of row i is a[p * STEP + i * ROW]; `pairs` is a multiple of 8. A number is
// one sum over the inputs in their order whatever R and B, so that a row's result does not depend on how many rows are
// multiplied with it. Where sums are few, the CPU waits for additions, unless the loop has so few other instructions that
// it looks ahead as far as the next block.
template <int R, int B, int STEP, int ROW>
void tile_bf16(const uint32_t *a, const uint32_t *w, Spread spread, int pairs, float *out) {
  constexpr int AT_ONCE = R * B <= 4 ? 8 : 1;
  Sums acc[R][B];
  clear(acc);
  int p = 0;
  do {
#pragma GCC unroll 8
    for (int end = p + AT_ONCE; p < end; p++) {
      Pairs panel[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const uint32_t *from = w + b % 2 * spread.near + b / 2 * spread.far + size_t(p) * 16;
        panel[b] = load_pairs(from);
        if (R > 1) __builtin_prefetch(from + 512);  // the CPU prefetches for a single row by itself
      }
#pragma GCC unroll 28
      for (int i = 0; i < R; i++) {
        uint32_t pair = a[p * STEP + i * ROW];
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) dot(acc[i][b], pair, panel[b]);
      }
    }
  } while (p < pairs);
  for (int i = 0; i < R; i++)
    for (int b = 0; b < B; b++) store_sums(out + (i * B + b) * 16, acc[i][b]);
}

typedef void (*TileBf16)(const uint32_t *, const uint32_t *, Spread, int, float *);

template <int B, int... I>
inline TileBf16 pick_tile(int rows, std::integer_sequence<int, I...>) {
  static const TileBf16 tiles[] = {tile_bf16<I + 1, B, I + 1, 1>...};
  return tiles[rows - 1];
}

inline TileBf16 tile_of(int rows, int blocks) {
  return blocks == 4   ? pick_tile<4>(rows, std::make_integer_sequence<int, FEW_ROWS>())
         : blocks == 2 ? pick_tile<2>(rows, std::make_integer_sequence<int, WIDE_ROWS>())
                       : pick_tile<1>(rows, std::make_integer_sequence<int, MOST_ROWS>());
}

// How many of the blocks that are left are multiplied at once if all is in the cache: with few rows an addition would wait
// for the previous one.
inline int blocks_for(int rows, int left) {
  return rows <= FEW_ROWS && left >= 4 ? 4 : rows <= WIDE_ROWS && rows <= 4 && left >= 2 ? 2 : 1;
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The last inputs, when they do not fill a transposition: pairs `first` and on.
inline void pack_pairs(const uint16_t *x, size_t stride, int inputs, int R, int first, int pairs, uint32_t *out) {
  for (int p = first; p < pairs; p++)
    for (int i = 0; i < R; i++) {
      const uint16_t *row = x + size_t(i) * stride;
      out[p * R + i] = 2 * p + 1 < inputs ? load<uint32_t>(row + 2 * p) : 2 * p < inputs ? row[2 * p] : 0;
    }
}

void pack_rows_bf16(const uint16_t *x, size_t stride, int32_t inputs, const Rows *rows, int32_t tile) {
  int R = rows->height(tile), pairs = rows->padded_inputs / 2, whole = inputs / 32 * 16;
  const uint16_t *from = x + size_t(rows->begin(tile)) * stride;
  uint32_t *out = (uint32_t *)rows->bf16 + size_t(rows->begin(tile)) * pairs;
  for (int i = 0; i < R; i += 16) {
    const uint32_t *some[16];
    for (int j = 0; j < 16; j++) some[j] = (const uint32_t *)(from + size_t(i + j < R ? i + j : R - 1) * stride);
    for (int p = 0; p < whole; p += 16) {
      u32x16 column[16];
      transpose16(some, size_t(p), column);
      for (int j = 0; j < 16; j++) store_first(out + (p + j) * R + i, column[j], R - i);
    }
  }
  pack_pairs(from, stride, inputs, R, whole, pairs, out);
}

// ---------------------------------------------------------------- 8, 6 and 4 bits

#if defined(__AVX512VNNI__)
inline void dot4(i32x16 &acc, uint32_t a, u32x16 w) {
  acc = bits<i32x16>(_mm512_dpbusd_epi32(bits<__m512i>(acc), bits<__m512i>(w), _mm512_set1_epi32(int(a))));
}
#elif defined(__AVX2__)
inline void dot4(i32x16 &acc, uint32_t a, u32x16 w) {
  __m256i quad = _mm256_set1_epi32(int(a)), low = _mm256_set1_epi16(255);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8), odd = _mm256_srai_epi16(quad, 8);
  for (int i = 0; i < 2; i++) {
    __m256i part = load<__m256i>((const char *)&w + 32 * i), total = load<__m256i>((const char *)&acc + 32 * i);
    total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_and_si256(part, low), even));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_srli_epi16(part, 8), odd));
    store((char *)&acc + 32 * i, total);
  }
}
#else
inline void dot4(i32x16 &acc, uint32_t a, u32x16 w) {
  for (int j = 0; j < 4; j++) acc += (i32x16)((w >> (8 * j)) & 255) * int32_t(int8_t(a >> (8 * j)));
}
#endif

// One tile's activations: see Rows.
struct QuantRows {
  const uint32_t *quads;
  const float *scale, *weighted;
  const int32_t *sums, *starts;
};

struct QuantPanel {
  const uint8_t *data;
  const uint16_t *scale, *min;
  int group, offset;
};

// The inputs from 4 q on and from 16 + 4 q on, of the 32 at `data`, as bytes.
template <int BITS>
inline void unpack(const uint8_t *data, int q, u32x16 &low, u32x16 &high) {
  if constexpr (BITS == 8) {
    low = load<u32x16>(data + q * 64);
    high = load<u32x16>(data + 256 + q * 64);
    return;
  }
  u32x16 both = load<u32x16>(data + q * 64);
  low = both & 0x0f0f0f0fu;
  high = both >> 4 & 0x0f0f0f0fu;
  if constexpr (BITS == 6) {
    u32x16 first = load<u32x16>(data + 256), second = load<u32x16>(data + 320);
    low |= (q < 2 ? first << (4 - 2 * q) : first >> (2 * q - 4)) & 0x30303030u;
    high |= (q < 2 ? second << (4 - 2 * q) : second >> (2 * q - 4)) & 0x30303030u;
  }
}

// R rows times B blocks: out[R][stride]. A group's products are whole numbers; its scales make floats of them. This is for
// groups of 32, the most common, with an offset or with mins. A number is the same sum whatever R and B.
template <int R, int B, int BITS, bool MIN>
void tile_quant(const QuantRows &rows, const QuantPanel *w, int groups, int stride, float *out) {
  const uint32_t *a = rows.quads;
  const float *a_scale = rows.scale;
  f32x16 acc[R][B];
  clear(acc);
  for (int g = 0; g < groups; g++) {
    const uint8_t *data[B];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
      data[b] = w[b].data + size_t(g) * (BITS * 64);
      __builtin_prefetch(w[b].scale + size_t(g) * 16 + 256);
      if (MIN) __builtin_prefetch(w[b].min + size_t(g) * 16 + 256);
      constexpr int AHEAD = BITS == 8 && R == 1 ? 0 : BITS;  // cache lines; for a single stream of bytes the CPU's own prefetching is faster
#pragma GCC unroll 8
      for (int line = 0; line < AHEAD; line++) __builtin_prefetch(data[b] + line * 64 + 2048);
    }
    i32x16 whole[R][B];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) whole[i][b] = MIN ? i32x16{} : splat_int(rows.starts[g * R + i]);
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      u32x16 low[B], high[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) unpack<BITS>(data[b], q, low[b], high[b]);
      const uint32_t *quads = a + size_t(8 * g + q) * R;
#pragma GCC unroll 12
      for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) dot4(whole[i][b], quads[i], low[b]);
#pragma GCC unroll 12
      for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) dot4(whole[i][b], quads[4 * R + i], high[b]);
    }
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
      f32x16 scale = load_f16(w[b].scale + size_t(g) * 16);
#pragma GCC unroll 12
      for (int i = 0; i < R; i++)
        acc[i][b] += __builtin_convertvector(whole[i][b], f32x16) * (scale * a_scale[g * R + i]);
      if (!MIN) continue;
      f32x16 min = load_f16(w[b].min + size_t(g) * 16);
#pragma GCC unroll 12
      for (int i = 0; i < R; i++) acc[i][b] += min * rows.weighted[g * R + i];
    }
  }
  for (int i = 0; i < R; i++)
    for (int b = 0; b < B; b++) store(out + i * stride + b * 16, acc[i][b]);
}

// The same for groups of 16 or 32, and one block.
template <int R, int BITS>
void any_tile_quant(const QuantRows &rows, const QuantPanel *panel, int groups, int stride, float *out) {
  const QuantPanel &w = *panel;
  const uint32_t *a = rows.quads;
  const float *a_scale = rows.scale;
  const int32_t *a_sums = rows.sums;
  f32x16 acc[R][1];
  clear(acc);
  const int subs = 32 / w.group;
  for (int g = 0; g < groups; g++) {
    const uint8_t *data = w.data + size_t(g) * (BITS * 64);
    __builtin_prefetch(data + 2048);
    i32x16 whole[R];
    for (int sub = 0; sub < 2; sub++) {
      if (sub == 0 || subs == 2) {
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
          int32_t total = a_sums[(2 * g + sub) * R + i] + (subs == 1 ? a_sums[(2 * g + 1) * R + i] : 0);
          whole[i] = splat_int(-w.offset * total);
        }
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        u32x16 low, high;
        unpack<BITS>(data, q, low, high);
        const uint32_t *quad = a + size_t(8 * g + 4 * sub + q) * R;
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) dot4(whole[i], quad[i], sub ? high : low);
      }
      if (sub == 1 || subs == 2) {
        size_t at = size_t(subs == 2 ? 2 * g + sub : g) * 16;
        f32x16 scale = load_f16(w.scale + at);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++)
          acc[i][0] += __builtin_convertvector(whole[i], f32x16) * (scale * a_scale[g * R + i]);
        if (w.min) {
          f32x16 min = load_f16(w.min + at);
          for (int i = 0; i < R; i++) {
            int32_t total = a_sums[(2 * g + sub) * R + i] + (subs == 1 ? a_sums[2 * g * R + i] : 0);
            acc[i][0] += min * (a_scale[g * R + i] * float(total));
          }
        }
      }
    }
  }
  for (int i = 0; i < R; i++) store(out + i * stride, acc[i][0]);
}

typedef void (*TileQuant)(const QuantRows &, const QuantPanel *, int, int, float *);

inline int bits_of(const Matrix &m) { return m.kind == kvasir::Q8 ? 8 : m.kind == kvasir::Q6 ? 6 : 4; }

inline bool is_common(const Matrix &m) { return m.group == 32 && !(m.min && m.offset); }

template <int B, int... I>
inline TileQuant common_tile_of(const Matrix &m, int rows, std::integer_sequence<int, I...>) {
  static const TileQuant tiles[2][3][sizeof...(I)] = {
      {{tile_quant<I + 1, B, 8, false>...}, {tile_quant<I + 1, B, 6, false>...}, {tile_quant<I + 1, B, 4, false>...}},
      {{tile_quant<I + 1, B, 8, true>...}, {tile_quant<I + 1, B, 6, true>...}, {tile_quant<I + 1, B, 4, true>...}}};
  return tiles[m.min ? 1 : 0][(8 - bits_of(m)) / 2][rows - 1];
}

template <int... I>
inline TileQuant any_tile_of(const Matrix &m, int rows, std::integer_sequence<int, I...>) {
  static const TileQuant tiles[3][sizeof...(I)] = {
      {any_tile_quant<I + 1, 8>...}, {any_tile_quant<I + 1, 6>...}, {any_tile_quant<I + 1, 4>...}};
  return tiles[(8 - bits_of(m)) / 2][rows - 1];
}

inline TileQuant quant_tile_of(const Matrix &m, int rows, int blocks) {
  return !is_common(m)   ? any_tile_of(m, rows, std::make_integer_sequence<int, QUANT_ROWS>())
         : blocks == 2 ? common_tile_of<2>(m, rows, std::make_integer_sequence<int, WIDE_QUANT_ROWS>())
                       : common_tile_of<1>(m, rows, std::make_integer_sequence<int, QUANT_ROWS>());
}

// 32 numbers as bytes, their sums by halves, and returns the scale. With infinity or NaN among them the scale is NaN.
inline float to_bytes(const uint16_t *values, int8_t out[32], int32_t sums[2]) {
#if defined(__AVX512BW__)
  __m512i size = _mm512_and_si512(_mm512_loadu_si512(values), _mm512_set1_epi16(0x7fff));  // sizes of bfloat16 are in order
  __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(size), _mm512_extracti64x4_epi64(size, 1));
  __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  uint32_t largest = 0xffff ^ uint32_t(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0));
  float most = largest < 0x7f80 ? bits<float>(largest << 16) : NAN, inverse = most > 0 ? 127.f / most : 0.f;
  __m128i bytes[2];
  for (int i = 0; i < 2; i++) {
    u32x16 y = bits<u32x16>(load_bf16(values + 16 * i) * inverse);
    f32x16 away = bits<f32x16>((y & 0x80000000u) | 0x3f000000u);  // 0.5 with the sign of y
    bytes[i] = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(bits<__m512>(bits<f32x16>(y) + away)));
  }
  __m256i both = _mm256_set_m128i(bytes[1], bytes[0]);
  _mm256_storeu_si256((__m256i *)out, both);
  int64_t parts[4];
  _mm256_storeu_si256((__m256i *)parts, _mm256_sad_epu8(_mm256_xor_si256(both, _mm256_set1_epi8(-128)), _mm256_setzero_si256()));
  for (int i = 0; i < 2; i++) sums[i] = int32_t(parts[2 * i] + parts[2 * i + 1]) - 16 * 128;
  return most / 127.f;
#else
  f32x16 v[2] = {load_bf16(values), load_bf16(values + 16)};
  float most = largest(maximum(maximum(v[0], -v[0]), maximum(v[1], -v[1])));
  if (any(~((v[0] - v[0] == 0.f) & (v[1] - v[1] == 0.f)))) {
    v[0] = v[1] = f32x16{};
    most = NAN;
  }
  float inverse = most > 0 ? 127.f / most : 0.f;
  for (int i = 0; i < 2; i++) {
    f32x16 y = v[i] * inverse;
    i32x16 n = __builtin_convertvector(y + select(y < 0.f, splat(-0.5f), splat(0.5f)), i32x16);
    sums[i] = 0;
    for (int j = 0; j < 16; j++) out[16 * i + j] = int8_t(n[j]), sums[i] += n[j];
  }
  return most / 127.f;
#endif
}

void pack_rows_quant(const uint16_t *x, size_t stride, int32_t inputs, const Rows *rows, int32_t tile) {
  int R = rows->height(tile), K = rows->padded_inputs, begin = rows->begin(tile);
  uint32_t *q = (uint32_t *)rows->q + size_t(begin) * (K / 4);
  float *scales = rows->scale + size_t(begin) * (K / 32), *weighted = rows->weighted + size_t(begin) * (K / 32);
  int32_t *sums = rows->sums + size_t(begin) * (K / 16), *starts = rows->starts + size_t(begin) * (K / 32);
  for (int i = 0; i < R; i++) {
    const uint16_t *row = x + size_t(begin + i) * stride;
    int here = begin + i < rows->count ? inputs : 0;
    for (int g = 0; g < K / 32; g++) {
      uint16_t tail[32] = {};
      const uint16_t *values = row + 32 * g;
      if (here < 32 * (g + 1)) {
        if (here > 32 * g) memcpy(tail, values, 2 * size_t(here - 32 * g));
        values = tail;
      }
      int8_t bytes[32];
      int32_t halves[2];
      scales[g * R + i] = to_bytes(values, bytes, halves);
      for (int j = 0; j < 8; j++) q[size_t(8 * g + j) * R + i] = load<uint32_t>(bytes + 4 * j);
      for (int half = 0; half < 2; half++) sums[(2 * g + half) * R + i] = halves[half];
      int32_t both = halves[0] + halves[1];
      starts[g * R + i] = -rows->offset * both;
      weighted[g * R + i] = scales[g * R + i] * float(both);
    }
  }
}

// ---------------------------------------------------------------- any product

// The most rows of a tile over one block, and over two; 0: two are never multiplied at once.
inline int most_rows(const Matrix &m) { return m.kind == kvasir::BF16 ? MOST_ROWS : QUANT_ROWS; }
inline int wide_rows(const Matrix &m) {
  int most = m.kind == kvasir::BF16 ? WIDE_ROWS : is_common(m) ? WIDE_QUANT_ROWS : 0;
  return most > 4 ? most : 0;
}

// As few tiles as possible, of nearly equal size, so that none is padded.
void cut_rows(const Matrix *matrix, Rows *rows) {
  int most = most_rows(*matrix), wide = wide_rows(*matrix);
  if (wide && rows->count > most) most = wide;
  rows->tiles = ceil_div(rows->count, most);
  rows->tile = ceil_div(rows->count, rows->tiles);
  rows->tall = rows->count - rows->tiles * (rows->tile - 1);
}

// One tile times `blocks` blocks (1, 2 or 4), which lie `spread` blocks apart: out[R][blocks][16].
void one_tile(const Matrix &m, const Rows &rows, int tile, int block, Spread spread, int blocks, float *out) {
  int R = rows.height(tile), K = m.padded_inputs;
  if (m.kind == kvasir::BF16) {
    const uint32_t *a = (const uint32_t *)rows.bf16 + size_t(rows.begin(tile)) * (K / 2);
    size_t panel = size_t(K / 2) * 16;
    const uint32_t *w = (const uint32_t *)m.data + block * panel;
    if (blocks == 1 || R <= WIDE_ROWS) return tile_of(R, blocks)(a, w, {spread.near * panel, spread.far * panel}, K / 2, out);
  }
  if (m.kind == kvasir::BF16) {
    float one[MOST_ROWS * 16];
    for (int b = 0; b < blocks; b++) {
      one_tile(m, rows, tile, block + b % 2 * int(spread.near) + b / 2 * int(spread.far), {}, 1, one);
      for (int i = 0; i < R; i++) memcpy(out + (i * blocks + b) * 16, one + i * 16, 64);
    }
    return;
  }
  size_t at_group = size_t(rows.begin(tile)) * (K / 32), groups = size_t(K / m.group) * 16;
  QuantRows here{(const uint32_t *)rows.q + at_group * 8, rows.scale + at_group, rows.weighted + at_group, rows.sums + 2 * at_group,
                 rows.starts + at_group};
  QuantPanel panels[4];
  for (int b = 0; b < blocks; b++) {
    size_t at = size_t(block) + size_t(b % 2) * spread.near + size_t(b / 2) * spread.far;
    panels[b] = {(const uint8_t *)m.data + at * K * 2 * bits_of(m), m.scale + at * groups, m.min ? m.min + at * groups : nullptr,
                 m.group, m.offset};
  }
  int step = blocks > 1 && R <= wide_rows(m) ? 2 : 1;
  TileQuant multiply = quant_tile_of(m, R, step);
  for (int b = 0; b < blocks; b += step) multiply(here, panels + b, K / 32, blocks * 16, out + b * 16);
}

inline f32x16 with_bias(const Matrix &m, int block, f32x16 y) {
  if (!m.bias) return y;
  uint16_t tail[16] = {};
  const uint16_t *bias = m.bias + block * 16;
  if (block * 16 + 16 > m.outputs) bias = (const uint16_t *)memcpy(tail, bias, 2 * size_t(m.outputs - block * 16));
  return y + load_bf16(bias);
}

inline void store_block(uint16_t *out, f32x16 y, int count) {
  if (count >= 16) return store_bf16(out, y);
  uint16_t all[16];
  store_bf16(all, y);
  memcpy(out, all, 2 * size_t(count));
}

// Writes a tile of floats as bfloat16 outputs, with bias and activation. Gates and ups, `apart` blocks, alternate.
void finish_tile(const Product &p, int tile, int block, int apart, int blocks, const float *from) {
  const Matrix &m = *p.matrix;
  int R = p.rows->height(tile), begin = p.rows->begin(tile), width = p.gated ? m.outputs / 2 : m.outputs;
  for (int i = 0; i < R && begin + i < p.rows->count; i++) {
    uint16_t *out = p.out + size_t(begin + i) * p.out_stride;
    const float *row = from + i * blocks * 16;
    for (int b = 0; b < blocks; b += p.gated ? 2 : 1) {
      int at = block + (p.gated ? b / 2 : b);
      f32x16 y = with_bias(m, at, load<f32x16>(row + b * 16));
      if (p.gated) {
        f32x16 up = with_bias(m, at + apart, load<f32x16>(row + (b + 1) * 16));
        y = gated_value(y, up, p.activation);
      } else if (p.activate) {
        y = activate(round_bf16(y), p.activation);
      }
      store_block(out + at * 16, y, width - at * 16);
    }
  }
}

void product(const Product *p, int32_t block_begin, int32_t block_end) {
  const Matrix &m = *p->matrix;
  const Rows &rows = *p->rows;
  float buffer[(MOST_ROWS > 2 * WIDE_ROWS ? MOST_ROWS : 2 * WIDE_ROWS) * 2 * 16];
  bool wide = rows.tiles > 1 && rows.tile <= wide_rows(m);
  int apart = p->gated ? m.outputs / 32 : 1, each = p->gated ? 2 : 1;  // blocks for 16 outputs
  Spread spread{size_t(apart), p->gated ? size_t(1) : size_t(2)};
  for (int block = block_begin; block < block_end;) {
    int left = (block_end - block) * each, blocks = wide && left > 1 ? 2 : each;
    for (int tile = 0; tile < rows.tiles; tile++) {
      one_tile(m, rows, tile, block, spread, blocks, buffer);
      finish_tile(*p, tile, block, apart, blocks, buffer);
    }
    block += blocks / each;
  }
}

// Reads one row of the matrix as bfloat16, for embeddings.
void expand_row(const Matrix *matrix, int32_t output, uint16_t *out) {
  const Matrix &m = *matrix;
  int K = m.padded_inputs, block = output / 16, n = output % 16;
  if (m.kind == kvasir::PLAIN) {
    memcpy(out, (const uint16_t *)m.data + size_t(output) * size_t(m.inputs), 2 * size_t(m.inputs));
    return;
  }
  for (int k = 0; k < m.inputs; k++) {
    if (m.kind == kvasir::BF16) {
      out[k] = ((const uint16_t *)m.data)[(size_t(block) * (K / 2) + k / 2) * 32 + n * 2 + k % 2];
      continue;
    }
    const uint8_t *data = (const uint8_t *)m.data;
    int value;
    if (m.kind == kvasir::Q8) {
      value = data[(size_t(block) * (K / 4) + k / 4) * 64 + n * 4 + k % 4];
    } else {
      int g = k / 32, half = k % 32 / 16, quad = k % 16 / 4;
      data += (size_t(block) * (K / 32) + g) * (bits_of(m) * 64) + n * 4 + k % 4;
      value = data[quad * 64] >> (4 * half) & 15;
      if (m.kind == kvasir::Q6) value |= (data[256 + half * 64] >> (2 * quad) & 3) << 4;
    }
    size_t at = (size_t(block) * (K / m.group) + k / m.group) * 16 + n;
    out[k] = to_bf16(float(value - m.offset) * from_f16(m.scale[at]) + (m.min ? from_f16(m.min[at]) : 0.f));
  }
}

}  // namespace
