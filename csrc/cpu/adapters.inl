// One token's product with an adapter's two factors.
#pragma once

#include "pointwise.inl"

namespace {

using kvasir::Adapters;

constexpr int TOKENS = kvasir::ADAPTER_TOKENS;

// Dot products of T tokens with N rows that lie `stride` apart. Several sums at once hide the latency of each.
template <int T, int N>
inline void shrink_rows(const uint16_t *const *x, const uint16_t *rows, size_t stride, int size, float *const *out, int j) {
  f32x16 sums[T][N] = {};
  int at = 0;
#if defined(__AVX512BF16__)
  for (; at + 32 <= size; at += 32) {
    __m512bh v[T];
    for (int t = 0; t < T; t++) v[t] = (__m512bh)_mm512_loadu_si512(x[t] + at);
    for (int i = 0; i < N; i++) {
      __m512bh w = (__m512bh)_mm512_loadu_si512(rows + size_t(i) * stride + at);
      for (int t = 0; t < T; t++) sums[t][i] = bits<f32x16>(_mm512_dpbf16_ps(bits<__m512>(sums[t][i]), v[t], w));
    }
  }
#endif
  for (; at < size; at += 16) {
    int n = size - at < 16 ? size - at : 16;
    f32x16 v[T];
    for (int t = 0; t < T; t++) v[t] = load_some(x[t] + at, n);
    for (int i = 0; i < N; i++) {
      f32x16 w = load_some(rows + size_t(i) * stride + at, n);
      for (int t = 0; t < T; t++) sums[t][i] += v[t] * w;
    }
  }
  for (int t = 0; t < T; t++)
    for (int i = 0; i < N; i++) out[t][j + i] = round_bf16(sum(sums[t][i]));  // as the plain operations do
}

// y += low * rows of T tokens, for N vectors of sixteen outputs; the last may have fewer.
template <int T, int N>
inline void expand_columns(float *const *low, int rank, const uint16_t *rows, size_t stride, const float *gain,
                           const float *shift, uint16_t *const *y, size_t at, int last) {
  f32x16 sums[T][N] = {};
  for (int j = 0; j < rank; j++) {
    const uint16_t *row = rows + size_t(j) * stride;
    for (int i = 0; i < N; i++) {
      f32x16 w = load_some(row + 16 * i, i == N - 1 ? last : 16);
      for (int t = 0; t < T; t++) sums[t][i] += low[t][j] * w;
    }
  }
  for (int t = 0; t < T; t++)
    for (int i = 0; i < N; i++) {
      int n = i == N - 1 ? last : 16;
      f32x16 now = load_some(y[t] + at + 16 * i, n);
      if (gain) now = round_bf16(now * load_some(gain + 16 * i, n) + load_some(shift + 16 * i, n));
      store_some(y[t] + at + 16 * i, now + sums[t][i], n);
    }
}

template <int T>
void adapt_tokens(const Adapters *a, int32_t slot, const uint16_t *const *x, uint16_t *const *y, float *const *low) {
  int rank = a->uses[2 * slot], is_moved = a->uses[2 * slot + 1];
  size_t number = size_t(slot), outputs = size_t(a->outputs), inputs = size_t(a->inputs), begin = 0;
  for (int part = 0; part < a->parts; part++) {
    const uint16_t *rows = a->shrink + (number * size_t(a->parts) + size_t(part)) * size_t(a->rank) * inputs;
    int j = 0;
    for (; j + 4 <= rank; j += 4) shrink_rows<T, 4>(x, rows + size_t(j) * inputs, inputs, a->inputs, low, j);
    for (; j < rank; j++) shrink_rows<T, 1>(x, rows + size_t(j) * inputs, inputs, a->inputs, low, j);
    int count = a->part_outputs[part], at = 0;
    while (at < count) {
      size_t here = begin + size_t(at), moved = number * outputs + here;
      const float *gain = is_moved ? a->gain + moved : nullptr, *shift = is_moved ? a->shift + moved : nullptr;
      const uint16_t *columns = a->expand + number * size_t(a->rank) * outputs + here;
      if (count - at >= 64) {
        expand_columns<T, 4>(low, rank, columns, outputs, gain, shift, y, here, 16);
        at += 64;
      } else {
        expand_columns<T, 1>(low, rank, columns, outputs, gain, shift, y, here, count - at < 16 ? count - at : 16);
        at += 16;
      }
    }
    begin += size_t(count);
  }
}

// Up to TOKENS tokens of one slot. `low` has room for the numbers of one rank for each.
void adapt_rows(const Adapters *a, int32_t slot, int32_t count, const uint16_t *const *x, uint16_t *const *y, float *low) {
  if (!a->uses[2 * slot] && !a->uses[2 * slot + 1]) return;
  float *each[TOKENS];
  for (int t = 0; t < TOKENS; t++) each[t] = low + size_t(t) * size_t(a->rank);
  int t = 0;
  for (; t + 4 <= count; t += 4) adapt_tokens<4>(a, slot, x + t, y + t, each);
  for (; t + 2 <= count; t += 2) adapt_tokens<2>(a, slot, x + t, y + t, each);
  for (; t < count; t++) adapt_tokens<1>(a, slot, x + t, y + t, each);
}

}  // namespace
