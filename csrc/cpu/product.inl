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
constexpr int MOST_ROWS = 28, WIDE_ROWS = 14, FEW_ROWS = 4, QUANT_ROWS = 12;  // accumulators that fit into 32 registers
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 4, WIDE_ROWS = 2, FEW_ROWS = 1, QUANT_ROWS = 2;
#else
constexpr int MOST_ROWS = 4, WIDE_ROWS = 2, FEW_ROWS = 1, QUANT_ROWS = 4;
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

// Where the blocks of a tile lie: block b is at (b % 2) * near + (b / 2) * far.
struct Spread {
  size_t near, far;
};

// R rows times B blocks: out[R][B][16]. Pair p of row i is a[p * STEP + i * ROW]. A number is one sum over the inputs in
// their order whatever R and B, so that a row's result does not depend on how many rows are multiplied with it.
template <int R, int B, int STEP, int ROW>
void tile_bf16(const uint32_t *a, const uint32_t *w, Spread spread, int pairs, float *out) {
  Sums acc[R][B] = {};
  for (int p = 0; p < pairs; p++) {
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

// R rows times one block. A group's products are whole numbers; its scales make floats of them. This is for groups of 32,
// the most common, with an offset or with mins.
template <int R, int BITS, bool MIN>
void tile_quant(const QuantRows &rows, QuantPanel w, int groups, float *out) {
  const uint32_t *a = rows.quads;
  const float *a_scale = rows.scale;
  f32x16 acc[R] = {};
  for (int g = 0; g < groups; g++) {
    const uint8_t *data = w.data + size_t(g) * (BITS * 64);
    __builtin_prefetch(w.scale + size_t(g) * 16 + 256);
    if (MIN) __builtin_prefetch(w.min + size_t(g) * 16 + 256);
    constexpr int AHEAD = BITS == 8 && R == 1 ? 0 : BITS;  // cache lines; for a single stream of bytes the CPU's own prefetching is faster
#pragma GCC unroll 8
    for (int line = 0; line < AHEAD; line++) __builtin_prefetch(data + line * 64 + 2048);
    i32x16 whole[R];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) whole[i] = MIN ? i32x16{} : splat_int(rows.starts[g * R + i]);
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      u32x16 low, high;
      unpack<BITS>(data, q, low, high);
      const uint32_t *quads = a + size_t(8 * g + q) * R;
#pragma GCC unroll 12
      for (int i = 0; i < R; i++) dot4(whole[i], quads[i], low);
#pragma GCC unroll 12
      for (int i = 0; i < R; i++) dot4(whole[i], quads[4 * R + i], high);
    }
    f32x16 scale = load_f16(w.scale + size_t(g) * 16);
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) acc[i] += __builtin_convertvector(whole[i], f32x16) * (scale * a_scale[g * R + i]);
    if (!MIN) continue;
    f32x16 min = load_f16(w.min + size_t(g) * 16);
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) acc[i] += min * rows.weighted[g * R + i];
  }
  for (int i = 0; i < R; i++) store(out + i * 16, acc[i]);
}

// The same for groups of 16 or 32.
template <int R, int BITS>
void any_tile_quant(const QuantRows &rows, QuantPanel w, int groups, float *out) {
  const uint32_t *a = rows.quads;
  const float *a_scale = rows.scale;
  const int32_t *a_sums = rows.sums;
  f32x16 acc[R] = {};
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
          acc[i] += __builtin_convertvector(whole[i], f32x16) * (scale * a_scale[g * R + i]);
        if (w.min) {
          f32x16 min = load_f16(w.min + at);
          for (int i = 0; i < R; i++) {
            int32_t total = a_sums[(2 * g + sub) * R + i] + (subs == 1 ? a_sums[2 * g * R + i] : 0);
            acc[i] += min * (a_scale[g * R + i] * float(total));
          }
        }
      }
    }
  }
  for (int i = 0; i < R; i++) store(out + i * 16, acc[i]);
}

typedef void (*TileQuant)(const QuantRows &, QuantPanel, int, float *);

inline int bits_of(const Matrix &m) { return m.kind == kvasir::Q8 ? 8 : m.kind == kvasir::Q6 ? 6 : 4; }

template <int... I>
inline TileQuant quant_tile_of(const Matrix &m, int rows, std::integer_sequence<int, I...>) {
  static const TileQuant tiles[3][3][sizeof...(I)] = {
      {{tile_quant<I + 1, 8, false>...}, {tile_quant<I + 1, 6, false>...}, {tile_quant<I + 1, 4, false>...}},
      {{tile_quant<I + 1, 8, true>...}, {tile_quant<I + 1, 6, true>...}, {tile_quant<I + 1, 4, true>...}},
      {{any_tile_quant<I + 1, 8>...}, {any_tile_quant<I + 1, 6>...}, {any_tile_quant<I + 1, 4>...}}};
  int how = m.group != 32 || (m.min && m.offset) ? 2 : m.min ? 1 : 0;
  return tiles[how][(8 - bits_of(m)) / 2][rows - 1];
}

inline void narrow(i32x16 n, int8_t *out) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(bits<__m512i>(n)));
#else
  for (int i = 0; i < 16; i++) out[i] = int8_t(n[i]);
#endif
}

inline int32_t total(i32x16 n) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(bits<__m512i>(n));
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += n[i];
  return s;
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
      f32x16 v[2] = {load_bf16(values), load_bf16(values + 16)};
      float most = largest(maximum(maximum(v[0], -v[0]), maximum(v[1], -v[1])));
      if (any(~((v[0] - v[0] == 0.f) & (v[1] - v[1] == 0.f)))) {  // infinity or NaN, and so are all results
        v[0] = v[1] = f32x16{};
        most = NAN;
      }
      float inverse = most > 0 ? 127.f / most : 0.f;
      scales[g * R + i] = most / 127.f;
      for (int half = 0; half < 2; half++) {
        f32x16 y = v[half] * inverse;
        i32x16 n = __builtin_convertvector(y + select(y < 0.f, splat(-0.5f), splat(0.5f)), i32x16);
        int8_t bytes[16];
        narrow(n, bytes);
        for (int j = 0; j < 4; j++) q[size_t(8 * g + 4 * half + j) * R + i] = load<uint32_t>(bytes + 4 * j);
        sums[(2 * g + half) * R + i] = total(n);
      }
      int32_t both = sums[2 * g * R + i] + sums[(2 * g + 1) * R + i];
      starts[g * R + i] = -rows->offset * both;
      weighted[g * R + i] = scales[g * R + i] * float(both);
    }
  }
}

// ---------------------------------------------------------------- any product

// As few tiles as possible, of nearly equal size, so that none is padded.
void cut_rows(const Matrix *matrix, Rows *rows) {
  int most = matrix->kind != kvasir::BF16 ? QUANT_ROWS : rows->count <= MOST_ROWS || WIDE_ROWS <= 4 ? MOST_ROWS : WIDE_ROWS;
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
  float one[MOST_ROWS * 16];
  for (int b = 0; b < blocks; b++) {
    size_t at = size_t(block) + size_t(b % 2) * spread.near + size_t(b / 2) * spread.far;
    if (m.kind == kvasir::BF16) {
      one_tile(m, rows, tile, int(at), {}, 1, one);
    } else {
      size_t groups = size_t(K / m.group) * 16;
      QuantPanel panel{(const uint8_t *)m.data + at * K * 2 * bits_of(m), m.scale + at * groups,
                       m.min ? m.min + at * groups : nullptr, m.group, m.offset};
      size_t at_group = size_t(rows.begin(tile)) * (K / 32);
      QuantRows here{(const uint32_t *)rows.q + at_group * 8, rows.scale + at_group, rows.weighted + at_group, rows.sums + 2 * at_group,
                     rows.starts + at_group};
      quant_tile_of(m, R, std::make_integer_sequence<int, QUANT_ROWS>())(here, panel, K / 32, one);
    }
    for (int i = 0; i < R; i++) memcpy(out + (i * blocks + b) * 16, one + i * 16, 64);
  }
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
  bool wide = rows.tiles > 1 && rows.tile <= WIDE_ROWS && m.kind == kvasir::BF16;
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
