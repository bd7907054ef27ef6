// Attention of some queries over some keys of the paged cache: keys are packed like weights, 64 at a time, so that the
// product's tiles can be used; the softmax is computed online. The rows of a tile are queries times the heads that share a
// key head.
#pragma once

#include "product.inl"

namespace {

using kvasir::Attend;
using kvasir::KEYS;
using kvasir::SEGMENT;

constexpr int ATTEND_ROWS = WIDE_ROWS > 4 ? WIDE_ROWS : MOST_ROWS;
constexpr float HIDDEN = -INFINITY;

inline int padded_dim(int d) { return (d + 31) / 32 * 32; }

struct Scratch {
  uint32_t *query, *keys, *values, *weights;
  float *scores, *sums, *most, *total, *tile, *state;
  uint16_t *rows;
};

// Divides one piece of memory into buffers; with a null pointer it only measures.
inline size_t lay_out(char *memory, int rows, int d, Scratch *s) {
  size_t dim = size_t(padded_dim(d)), padded = size_t(ceil_div(rows, ATTEND_ROWS) + 1) * ATTEND_ROWS, at = 0;
  auto take = [&](size_t bytes) {
    char *p = memory + at;
    at += (bytes + 63) / 64 * 64;
    return (void *)p;
  };
  s->query = (uint32_t *)take(padded * dim * 2);
  s->keys = (uint32_t *)take(KEYS * dim * 2);
  s->values = (uint32_t *)take(KEYS * dim * 2);
  s->weights = (uint32_t *)take(ATTEND_ROWS * KEYS * 2);
  s->scores = (float *)take(ATTEND_ROWS * KEYS * 4);
  s->sums = (float *)take(padded * dim * 4);
  s->most = (float *)take(padded * 4);
  s->total = (float *)take(padded * 4);
  s->tile = (float *)take(ATTEND_ROWS * 2 * 64);
  s->rows = (uint16_t *)take(16 * dim * 2);
  s->state = (float *)take(size_t(rows) * size_t(d + 2) * 4);
  return at;
}

size_t attend_scratch(int32_t rows, int32_t head_dim) {
  Scratch s;
  return lay_out(nullptr, rows, head_dim, &s);
}

// ---------------------------------------------------------------- keys and values from the cache

// 16 vectors as rows of bfloat16 of padded length: in place if they fit, else copied, widened or zero.
inline void find_rows(const Attend &a, int first, bool values, uint16_t *copies, const uint32_t *rows[16]) {
  int d = a.head_dim, dim = padded_dim(d), seen = a.window ? a.first_position + 1 - a.window : 0;
  const Cache &c = a.cache;
  int64_t head = a.kv_head * c.head_stride + (values ? c.value_offset : 0);
  int block = first / c.block_size, place = first % c.block_size;
  for (int i = 0; i < 16; i++, place++) {
    if (place == c.block_size) block++, place = 0;
    int key = first + i;
    uint16_t *copy = copies + i * dim;
    rows[i] = (const uint32_t *)copy;
    if (key >= a.key_end || key < seen) {  // beyond the window the block may hold another sequence
      memset(copy, 0, 2 * size_t(dim));
      continue;
    }
    int64_t at = a.table[block] * c.block_stride + place * c.token_stride + head;
    if (c.is_int8) {
      const int8_t *q = (const int8_t *)c.data + at;
      float scale;
      memcpy(&scale, q + d, 4);
      for (int j = 0; j < d; j++) copy[j] = to_bf16(float(q[j]) * scale);
    } else if (d == dim) {
      rows[i] = (const uint32_t *)((const uint16_t *)c.data + at);
      continue;
    } else {
      memcpy(copy, (const uint16_t *)c.data + at, 2 * size_t(d));
    }
    memset(copy + d, 0, 2 * size_t(dim - d));
  }
}

inline void interleave(const uint16_t *even, const uint16_t *odd, uint32_t *out) {
#if defined(__AVX512F__)
  __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)even));
  __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)odd));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
  for (int i = 0; i < 16; i++) out[i] = even[i] | uint32_t(odd[i]) << 16;
#endif
}

// keys[16 keys][dim / 2][16], values[dim / 16][KEYS / 2][16]
void pack_keys(const Attend &a, int first, int count, const Scratch &s) {
  int dim = padded_dim(a.head_dim);
  for (int k = 0; k < count; k += 16) {
    const uint32_t *rows[16];
    find_rows(a, first + k, false, s.rows, rows);
    for (int j = 0; j < dim / 2; j += 16) {
      u32x16 column[16];
      transpose16(rows, size_t(j), column);
      memcpy(s.keys + (size_t(k) / 16 * (dim / 2) + j) * 16, column, sizeof column);
    }
    find_rows(a, first + k, true, s.rows, rows);
    for (int i = 0; i < 16; i += 2)
      for (int j = 0; j < dim; j += 16)
        interleave((const uint16_t *)rows[i] + j, (const uint16_t *)rows[i + 1] + j,
                   s.values + (size_t(j) / 16 * (KEYS / 2) + size_t(k + i) / 2) * 16);
  }
}

// ---------------------------------------------------------------- the softmax along the way

template <int B, int... I>
inline TileBf16 pick_weighted_sum(int rows, std::integer_sequence<int, I...>) {
  static const TileBf16 tiles[] = {tile_bf16<I + 1, B, 1, KEYS / 2>...};
  return tiles[rows - 1];
}

inline TileBf16 weighted_sum_of(int rows, int blocks) {
  return blocks == 4   ? pick_weighted_sum<4>(rows, std::make_integer_sequence<int, FEW_ROWS>())
         : blocks == 2 ? pick_weighted_sum<2>(rows, std::make_integer_sequence<int, WIDE_ROWS>())
                       : pick_weighted_sum<1>(rows, std::make_integer_sequence<int, ATTEND_ROWS>());
}

// Masks the keys from `first` on that row `r` may not see.
inline void hide(const Attend &a, int r, int first, int count, float *scores) {
  int position = a.first_position + r / a.shared;
  int end = a.causal && position + 1 < a.key_end ? position + 1 : a.key_end;
  int begin = a.window && position + 1 - a.window > a.key_begin ? position + 1 - a.window : a.key_begin;
  for (int k = end - first < 0 ? 0 : end - first; k < count; k++) scores[k] = HIDDEN;
  for (int k = 0; k < begin - first && k < count; k++) scores[k] = HIDDEN;
}

// Turns the scores of one row into weights; returns the factor for the row's sums so far.
inline float weigh(const float *scores, int count, uint16_t *weights, float &most, float &total) {
  f32x16 high = splat(HIDDEN);
  for (int k = 0; k < count; k += 16) high = maximum(high, load<f32x16>(scores + k));
  float before = most, now = largest(high);
  most = now > most ? now : most;
  f32x16 sums = {};
  for (int k = 0; k < count; k += 16) {
    f32x16 w = exponential(load<f32x16>(scores + k) - (most == HIDDEN ? 0.f : most));
    sums += w;
    store_bf16(weights + k, w);
  }
  if (most == before) {
    total += sum(sums);
    return 1.f;
  }
  float shrink = before == HIDDEN ? 0.f : exponential(splat(before - most))[0];
  total = total * shrink + sum(sums);
  return shrink;
}

void attend_tile(const Attend &a, const Scratch &s, int begin, int R, int first, int count) {
  int dim = padded_dim(a.head_dim), rows = a.num_queries * a.shared;
  const uint32_t *query = s.query + size_t(begin) * (dim / 2);
  float cap = a.softcap;
  size_t panel = size_t(dim / 2) * 16;
  for (int k = 0, blocks; k < count; k += 16 * blocks) {
    blocks = blocks_for(R, (count - k) / 16);
    tile_of(R, blocks)(query, s.keys + size_t(k) / 16 * panel, {panel, 2 * panel}, dim / 2, s.tile);
    for (int i = 0; i < R; i++)
      for (int b = 0; b < blocks; b++) {
        f32x16 v = load<f32x16>(s.tile + (i * blocks + b) * 16) * a.scale;
        store(s.scores + i * KEYS + k + 16 * b, cap > 0 ? cap * hyperbolic_tangent(v / cap) : v);
      }
  }
  for (int i = 0; i < R; i++) {
    int row = begin + i < rows ? begin + i : rows - 1;
    hide(a, row, first, count, s.scores + i * KEYS);
    uint16_t *weights = (uint16_t *)(s.weights + i * (KEYS / 2));
    float shrink = weigh(s.scores + i * KEYS, count, weights, s.most[begin + i], s.total[begin + i]);
    if (shrink == 1.f) continue;
    float *sums = s.sums + size_t(begin + i) * dim;
    for (int j = 0; j < dim; j += 16) store(sums + j, load<f32x16>(sums + j) * shrink);
  }
  panel = KEYS / 2 * 16;
  for (int j = 0, blocks; j < dim; j += 16 * blocks) {
    blocks = blocks_for(R, (dim - j) / 16);
    weighted_sum_of(R, blocks)(s.weights, s.values + size_t(j) / 16 * panel, {panel, 2 * panel}, count / 2, s.tile);
    for (int i = 0; i < R; i++)
      for (int b = 0; b < blocks; b++) {
        float *sums = s.sums + size_t(begin + i) * dim + j + 16 * b;
        store(sums, load<f32x16>(sums) + load<f32x16>(s.tile + (i * blocks + b) * 16));
      }
  }
}

// ---------------------------------------------------------------- segments

// A row's results so far, [head_dim + 2] as in Attend::partial, before the first segment.
inline void begin_row(float *state, int d) {
  memset(state, 0, 4 * size_t(d + 1));
  state[d] = HIDDEN;
  state[d + 1] = 0;
}

// Adds a segment's results to those of the segments before. All callers share one compiled function, because the compiler
// may fuse a multiplication with an addition in one copy and not in another.
__attribute__((noinline)) void add_segment(float *state, const float *sums, float most, float total, int d) {
  if (most == HIDDEN && total == 0) return;  // the row sees none of the segment's keys
  float before = state[d], now = most > before ? most : before;
  float old = before == now ? 1.f : exponential(splat(before - now))[0];
  float added = most == now ? 1.f : exponential(splat(most - now))[0];
  for_each_16(d, [&](int at, int n) {
    f32x16 v = load_some(state + at, n) * old + load_some(sums + at, n) * added;
    memcpy(state + at, &v, 4 * size_t(n));
  });
  state[d] = now;
  state[d + 1] = state[d + 1] * old + total * added;
}

__attribute__((noinline)) void finish_row(const Attend &a, int row, const float *state) {
  int d = a.head_dim;
  uint16_t *out = a.out + size_t(row / a.shared) * a.out_stride + size_t(row % a.shared) * d;
  float total = state[d + 1];
  if (a.sinks && total > 0) total += exponential(splat(a.sinks[row % a.shared] - state[d]))[0];
  float share = total == 0 ? 0.f : 1.f / total;
  for_each_16(d, [&](int at, int n) { store_some(out + at, load_some(state + at, n) * share, n); });
}

void merge(const Attend *task, int32_t segments) {
  const Attend &a = *task;
  int rows = a.num_queries * a.shared, d = a.head_dim;
  for (int row = 0; row < rows; row++) {
    begin_row(a.scratch, d);
    for (int i = 0; i < segments; i++) {
      const float *part = a.partial + (size_t(i) * rows + row) * (d + 2);
      add_segment(a.scratch, part, part[d], part[d + 1], d);
    }
    finish_row(a, row, a.scratch);
  }
}

// All queries over the keys `begin` to `end` of one segment, in tiles of R rows.
void attend_segment(const Attend &a, const Scratch &s, int R, int begin, int end) {
  int rows = a.num_queries * a.shared, tiles = ceil_div(rows, R);
  memset(s.sums, 0, size_t(tiles) * R * padded_dim(a.head_dim) * 4);
  for (int i = 0; i < tiles * R; i++) s.most[i] = HIDDEN, s.total[i] = 0;
  for (int first = begin; first < end; first += KEYS) {
    int count = end - first < KEYS ? ceil_div(end - first, 16) * 16 : KEYS;
    pack_keys(a, first, count, s);
    for (int tile = 0; tile < tiles; tile++) {
      int last = (tile + 1) * R - 1 < rows ? (tile + 1) * R - 1 : rows - 1;
      if (a.causal && first > a.first_position + last / a.shared) continue;
      attend_tile(a, s, tile * R, R, first, count);
    }
  }
}

void attend(const Attend *task) {
  const Attend &a = *task;
  int d = a.head_dim, dim = padded_dim(d), rows = a.num_queries * a.shared;
  int R = ceil_div(rows, ceil_div(rows, ATTEND_ROWS)), tiles = ceil_div(rows, R);
  Scratch s;
  lay_out((char *)a.scratch, rows, d, &s);
  for (int tile = 0; tile < tiles; tile++)
    for (int i = 0; i < R; i++) {
      int row = tile * R + i < rows ? tile * R + i : rows - 1;
      const uint16_t *q = a.query + size_t(row / a.shared) * a.query_stride + size_t(row % a.shared) * d;
      uint16_t *copy = s.rows;  // no keys are in it yet
      memcpy(copy, q, 2 * size_t(d));
      memset(copy + d, 0, 2 * size_t(dim - d));
      uint32_t *to = s.query + size_t(tile) * R * (dim / 2) + i;
      for (int p = 0; p < dim / 2; p++) to[size_t(p) * R] = load<uint32_t>(copy + 2 * p);
    }
  for (int row = 0; row < rows; row++) begin_row(s.state + size_t(row) * (d + 2), d);
  float *partial = a.partial;
  for (int begin = a.key_begin, end; begin < a.key_end; begin = end) {
    end = std::min(a.key_end, (begin / SEGMENT + 1) * SEGMENT);
    attend_segment(a, s, R, begin, end);
    for (int row = 0; row < rows; row++) {
      const float *sums = s.sums + size_t(row) * dim;
      if (!partial) {
        add_segment(s.state + size_t(row) * (d + 2), sums, s.most[row], s.total[row], d);
        continue;
      }
      memcpy(partial, sums, 4 * size_t(d));
      partial[d] = s.most[row];
      partial[d + 1] = s.total[row];
      partial += d + 2;
    }
  }
  for (int row = 0; row < rows && !partial; row++) finish_row(a, row, s.state + size_t(row) * (d + 2));
}

}  // namespace
