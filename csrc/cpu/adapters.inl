// Products of a few tokens with one adapter's two factors. With few tokens the time goes into reading the factors, so they
// are read as long streams, and each four rows ask for the four that come next.
#pragma once

#include "pointwise.inl"

namespace {

using kvasir::AdapterGroup;
using kvasir::Adapters;

constexpr int ROWS_AT_ONCE = 4;        // several sums at once hide the latency of each
constexpr int COLUMNS_AT_ONCE = 1024;  // outputs whose sums stay in the cache
constexpr int LINE = 32;               // numbers of a cache line
constexpr int MOST_SUMS = COLUMNS_AT_ONCE + kvasir::MAX_PARTS * LINE;
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Dot products of T tokens with N rows that lie `stride` apart; `next` are the rows to be read after these. WHOLE: `size`
// is a multiple of LINE.
template <int T, int N, bool WHOLE>
inline void shrink_rows(const uint16_t *const *x, const uint16_t *rows, const uint16_t *next, size_t stride, int size,
                        float *const *out, int j) {
  f32x16 sums[T][N] = {};
  int at = 0;
#if defined(__AVX512BF16__)
  for (; at + LINE <= size; at += LINE) {
    __m512bh v[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) v[t] = (__m512bh)_mm512_loadu_si512(x[t] + at);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      __m512bh w = (__m512bh)_mm512_loadu_si512(rows + size_t(i) * stride + at);
      __builtin_prefetch(next + size_t(i) * stride + at);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) sums[t][i] = bits<f32x16>(_mm512_dpbf16_ps(bits<__m512>(sums[t][i]), v[t], w));
    }
  }
#endif
  for (; !WHOLE && at < size; at += 16) {
    int n = size - at < 16 ? size - at : 16;
    f32x16 v[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) v[t] = load_some(x[t] + at, n);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      f32x16 w = load_some(rows + size_t(i) * stride + at, n);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) sums[t][i] += v[t] * w;
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) out[t][j + i] = round_bf16(sum(sums[t][i]));  // as the plain operations do
}

// sums += low * N rows of T tokens, over `count` outputs; `next` are the rows to be read after these. Sums are kept in
// blocks of LINE, whose order only `read_sums` knows.
#if defined(__AVX512BF16__)
template <int T, int N>
inline void expand_rows(const float *const *low, const uint16_t *rows, const uint16_t *next, size_t stride, int count,
                        float *const *sums) {
  constexpr int PAIRS = (N + 1) / 2;  // of rows; the partner of a single row is zero
  __m512bh factors[T][PAIRS];
#pragma GCC unroll 4
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
      uint32_t first = bits<uint32_t>(low[t][2 * p]) >> 16, second = N == 1 ? 0 : bits<uint32_t>(low[t][2 * p + 1]);
      factors[t][p] = (__m512bh)_mm512_set1_epi32(int(first | (second & 0xffff0000u)));
    }
  for (int at = 0; at < count; at += LINE) {
    __mmask32 there = count - at < LINE ? (1u << (count - at)) - 1 : ~0u;
    __m512 own[T][2];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) own[t][0] = _mm512_load_ps(sums[t] + at), own[t][1] = _mm512_load_ps(sums[t] + at + 16);
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
      size_t place = size_t(2 * p) * stride + size_t(at);
      __m512i first = _mm512_maskz_loadu_epi16(there, rows + place), second = _mm512_setzero_si512();
      __builtin_prefetch(next + place);
      if (N > 1) {
        second = _mm512_maskz_loadu_epi16(there, rows + place + stride);
        __builtin_prefetch(next + place + stride);
      }
      __m512bh low_half = (__m512bh)_mm512_unpacklo_epi16(first, second);
      __m512bh high_half = (__m512bh)_mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        own[t][0] = _mm512_dpbf16_ps(own[t][0], low_half, factors[t][p]);
        own[t][1] = _mm512_dpbf16_ps(own[t][1], high_half, factors[t][p]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) _mm512_store_ps(sums[t] + at, own[t][0]), _mm512_store_ps(sums[t] + at + 16, own[t][1]);
  }
}

// Sixteen sums, those of outputs `at` and on. The halves of a block hold four outputs of each eight.
inline f32x16 read_sums(const float *sums, int at) {
  const float *block = sums + at / LINE * LINE;
  __m512i own = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  if (at % LINE) own = _mm512_add_epi32(own, _mm512_set1_epi32(8));
  return bits<f32x16>(_mm512_permutex2var_ps(_mm512_load_ps(block), own, _mm512_load_ps(block + 16)));
}
#else
template <int T, int N>
inline void expand_rows(const float *const *low, const uint16_t *rows, const uint16_t *next, size_t stride, int count,
                        float *const *sums) {
  for (int at = 0; at < count; at += 16) {
    int n = count - at < 16 ? count - at : 16;
    f32x16 own[T];
    for (int t = 0; t < T; t++) own[t] = load<f32x16>(sums[t] + at);
    for (int i = 0; i < N; i++) {
      f32x16 w = load_some(rows + size_t(i) * stride + at, n);
      if (at % LINE == 0) __builtin_prefetch(next + size_t(i) * stride + at);
      for (int t = 0; t < T; t++) own[t] += low[t][i] * w;
    }
    for (int t = 0; t < T; t++) store(sums[t] + at, own[t]);
  }
}

inline f32x16 read_sums(const float *sums, int at) { return load<f32x16>(sums + at); }
#endif

template <int T>
void shrink_tokens(const Adapters &a, const AdapterGroup &g, int begin, int end) {
  int rank = a.uses[2 * g.slot];
  size_t inputs = size_t(a.inputs), low_stride = size_t(a.parts) * size_t(a.rank);
  bool is_even = HAS_PAIRS && a.inputs % LINE == 0;
  int all = rank * a.parts;
  float *low[T];
  for (int t = 0; t < T; t++) low[t] = g.low + size_t(t) * low_stride;
  for (int part = 0; part < a.parts; part++) {
    int before = part * rank, j = begin > before ? begin - before : 0, to = end < before + rank ? end - before : rank;
    const uint16_t *first = a.shrink + (size_t(g.slot) * size_t(a.parts) + size_t(part)) * size_t(a.rank) * inputs;
    while (j < to) {
      int count = to - j >= ROWS_AT_ONCE ? ROWS_AT_ONCE : 1, row = part * a.rank + j;
      const uint16_t *rows = first + size_t(j) * inputs, *next = rows + size_t(count) * inputs;
      if (j + count == to) next = before + to < end ? first + size_t(a.rank) * inputs : end == all ? g.next_shrink : rows;
      if (count == 1) {
        shrink_rows<T, 1, false>(g.x, rows, next, inputs, a.inputs, low, row);
      } else if (is_even) {
        shrink_rows<T, ROWS_AT_ONCE, true>(g.x, rows, next, inputs, a.inputs, low, row);
      } else {
        shrink_rows<T, ROWS_AT_ONCE, false>(g.x, rows, next, inputs, a.inputs, low, row);
      }
      j += count;
    }
  }
}

// The outputs of a part within a span, and where their sums are.
struct Segment {
  int part, begin, end, place;
};

int cut_span(const Adapters &a, int begin, int end, Segment *segments) {
  int count = 0, place = 0;
  for (int part = 0, first = 0; part < a.parts; first += a.part_outputs[part++]) {
    int last = first + a.part_outputs[part], from = begin > first ? begin : first, to = end < last ? end : last;
    if (from >= to) continue;
    segments[count++] = {part, from, to, place};
    place += (to - from + LINE - 1) / LINE * LINE;
  }
  return count;
}

// The sums of outputs from `begin` on, four rows at a time; `next`: see expand_rows.
template <int T>
void sum_rows(const Adapters &a, const AdapterGroup &g, int begin, const Segment *segments, int count, const uint16_t *next,
              float (*sums)[MOST_SUMS]) {
  int rank = a.uses[2 * g.slot];
  size_t stride = size_t(a.outputs);
  const uint16_t *rows = a.expand + size_t(g.slot) * size_t(a.rank) * stride + begin;
  for (int j = 0, some; j < rank; j += some) {
    some = rank - j >= ROWS_AT_ONCE ? ROWS_AT_ONCE : 1;
    const uint16_t *soon = j + some < rank ? rows + size_t(some) * stride : next ? next : rows;
    for (const Segment *s = segments; s < segments + count; s++) {
      const float *low[T];
      float *own[T];
      for (int t = 0; t < T; t++) {
        low[t] = g.low + (size_t(t) * size_t(a.parts) + size_t(s->part)) * size_t(a.rank) + j;
        own[t] = sums[t] + s->place;
      }
      int from = s->begin - begin, size = s->end - s->begin;
      if (some == 1) {
        expand_rows<T, 1>(low, rows + from, soon + from, stride, size, own);
      } else {
        expand_rows<T, ROWS_AT_ONCE>(low, rows + from, soon + from, stride, size, own);
      }
    }
    rows += size_t(some) * stride;
  }
}

template <int T>
void expand_tokens(const Adapters &a, const AdapterGroup &g, int begin, int end) {
  int is_moved = a.uses[2 * g.slot + 1];
  size_t outputs = size_t(a.outputs), slot = size_t(g.slot);
  Segment segments[kvasir::MAX_PARTS];
  alignas(64) float sums[T][MOST_SUMS];
  for (int from = begin, to; from < end; from = to) {
    to = end - from < COLUMNS_AT_ONCE ? end : from + COLUMNS_AT_ONCE;
    int count = cut_span(a, from, to, segments);
    for (int t = 0; t < T; t++) memset(sums[t], 0, sizeof(float) * size_t(to - from + LINE * count));
    const uint16_t *next = to < end ? a.expand + slot * size_t(a.rank) * outputs + to
                           : begin == 0 && end == a.outputs ? g.next_expand
                                                            : nullptr;
    sum_rows<T>(a, g, from, segments, count, next, sums);
    for (const Segment *s = segments; s < segments + count; s++)
      for (int at = s->begin; at < s->end; at += 16) {
        int n = s->end - at < 16 ? s->end - at : 16;
        size_t moved = slot * outputs + size_t(at);
        for (int t = 0; t < T; t++) {
          f32x16 now = load_some(g.y[t] + at, n);
          if (is_moved) now = round_bf16(now * load_some(a.gain + moved, n) + load_some(a.shift + moved, n));
          store_some(g.y[t] + at, now + read_sums(sums[t] + s->place, at - s->begin), n);
        }
      }
  }
}

// The first product, rows `begin` to `end` of those in use.
void adapter_shrink(const Adapters *a, const AdapterGroup *g, int32_t begin, int32_t end) {
  static constexpr decltype(&shrink_tokens<1>) all[] = {shrink_tokens<1>, shrink_tokens<2>, shrink_tokens<3>,
                                                     shrink_tokens<4>};
  all[g->tokens - 1](*a, *g, begin, end);
}

// The second product and what is done with it, outputs `begin` to `end`.
void adapter_expand(const Adapters *a, const AdapterGroup *g, int32_t begin, int32_t end) {
  static constexpr decltype(&expand_tokens<1>) all[] = {expand_tokens<1>, expand_tokens<2>, expand_tokens<3>,
                                                     expand_tokens<4>};
  all[g->tokens - 1](*a, *g, begin, end);
}

}  // namespace
