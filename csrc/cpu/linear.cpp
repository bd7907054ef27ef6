#include "linear.h"

#include <algorithm>

#include "bfloat.h"
#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int ROWS_BUFFER = 0, HALVES_BUFFER = 4, ARRANGED_BUFFER = 7;
constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers to pack

// Brings the rows into the kernels' layout. A single row of bfloat16 is in it already.
Rows pack_rows(const Kernels &set, const Matrix &m, const uint16_t *x, size_t stride, int count) {
  Rows rows{};
  rows.count = count;
  rows.padded_inputs = m.padded_inputs;
  set.cut_rows(&m, &rows);
  if (m.kind == BF16 && count == 1 && m.inputs == m.padded_inputs) {
    rows.bf16 = const_cast<uint16_t *>(x);
    return rows;
  }
  size_t numbers = size_t(rows.begin(rows.tiles)) * size_t(m.padded_inputs);
  char *memory = (char *)thread_buffer(ROWS_BUFFER, numbers * 2 + 256);
  if (m.kind == BF16) {
    rows.bf16 = (uint16_t *)memory;
  } else {  // one byte per number, four bytes per 32 numbers for scales, four per 16 for sums
    rows.q = (int8_t *)memory;
    rows.scale = (float *)(memory + numbers);
    rows.weighted = rows.scale + numbers / 32;
    rows.starts = (int32_t *)(rows.weighted + numbers / 32);
    rows.sums = rows.starts + numbers / 32;
    rows.offset = m.offset;
  }
  auto pack = m.kind == BF16 ? set.pack_bf16 : set.pack_quant;
  auto one = [&](int tile) { pack(x, stride, m.inputs, &rows, tile); };
  if (int64_t(numbers) < WORTH_SHARING) {
    for (int tile = 0; tile < rows.tiles; tile++) one(tile);
  } else {
    parallel(rows.tiles, one);
  }
  return rows;
}

// Rows of inputs in the matrix's order, times its factors.
const uint16_t *arrange(const Matrix &m, const uint16_t *x, size_t stride, int count) {
  size_t inputs = size_t(m.inputs);
  auto *arranged = (uint16_t *)thread_buffer(ARRANGED_BUFFER, size_t(count) * inputs * 2);
  auto one = [&](int row) {
    const uint16_t *from = x + size_t(row) * stride;
    uint16_t *to = arranged + size_t(row) * inputs;
    for (size_t k = 0; k < inputs; k++) {
      size_t source = m.order ? size_t(m.order[k]) : k;
      to[k] = m.factor ? to_bfloat(from_bfloat(from[source]) * m.factor[source]) : from[source];
    }
  };
  if (int64_t(count) * int64_t(inputs) < WORTH_SHARING) {
    for (int row = 0; row < count; row++) one(row);
  } else {
    parallel(count, one);
  }
  return arranged;
}

// Gate and up that do not fill whole blocks are multiplied first and combined afterwards.
void gate_apart(const Matrix &m, const uint16_t *x, size_t stride, int count, uint16_t *out, size_t out_stride,
                int activation) {
  const Kernels &set = kernels();
  size_t both = size_t(m.outputs);
  auto *halves = (uint16_t *)thread_buffer(HALVES_BUFFER, size_t(count) * both * 2);
  linear(m, x, stride, count, halves, both);
  auto join = [&](int row) {
    set.gated(halves + size_t(row) * both, out + size_t(row) * out_stride, int32_t(both / 2), activation);
  };
  if (int64_t(count) * int64_t(both) < WORTH_SHARING) {
    for (int row = 0; row < count; row++) join(row);
  } else {
    parallel(count, join);
  }
}

}  // namespace

void linear(const Matrix &m, const uint16_t *x, size_t stride, int count, uint16_t *out, size_t out_stride, After after,
            int activation) {
  if (count == 0) return;
  if (after == GATE && m.outputs % 32) return gate_apart(m, x, stride, count, out, out_stride, activation);
  const Kernels &set = kernels();
  if (m.order || m.factor) x = arrange(m, x, stride, count), stride = size_t(m.inputs);
  Rows rows = pack_rows(set, m, x, stride, count);
  Product work{&m, &rows, out, out_stride, after == GATE, after == ACTIVATE, activation};
  int blocks = after == GATE ? m.outputs / 32 : (m.outputs + 15) / 16;
  int step = std::max(2, blocks / (pool_threads() * 16) / 2 * 2);
  parallel((blocks + step - 1) / step,
           [&](int task) { set.product(&work, task * step, std::min(blocks, (task + 1) * step)); });
}

}  // namespace kvasir

using namespace kvasir;

void kv_linear(const Matrix *m, const uint16_t *x, int64_t stride, int32_t rows, int32_t activation, uint16_t *out) {
  linear(*m, x, size_t(stride), rows, out, size_t(m->outputs), activation < 0 ? NOTHING : ACTIVATE, activation);
}

void kv_gated_linear(const Matrix *m, const uint16_t *x, int64_t stride, int32_t rows, int32_t activation,
                     uint16_t *out) {
  linear(*m, x, size_t(stride), rows, out, size_t(m->outputs / 2), GATE, activation);
}

void kv_linears(const Matrix *m, int32_t count, const uint16_t *x, const kv_spans *from, int32_t rows, uint16_t *out,
                const kv_spans *to) {
  for (int i = 0; i < count; i++)
    linear(m[i], x + i * from->step, size_t(from->stride), rows, out + i * to->step, size_t(to->stride));
}
