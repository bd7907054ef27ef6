// Packs weights of a checkpoint into the kernels' layouts, and quantizes them if the format is quantized.
#include "pack.h"

#include <algorithm>
#include <vector>

#include "bfloat.h"
#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Source {
  const void *data;
  int type;
  int64_t stride;

  void read(int row, int count, float *out) const {
    int64_t begin = row * stride;
    for (int i = 0; i < count; i++) {
      if (type == FLOAT32) {
        out[i] = ((const float *)data)[begin + i];
      } else if (type == FLOAT16) {
        out[i] = half_to_float(((const uint16_t *)data)[begin + i]);
      } else {
        uint32_t u = uint32_t(((const uint16_t *)data)[begin + i]) << 16;
        memcpy(out + i, &u, 4);
      }
    }
  }
};

// Packs rows begin .. end of one block.
void pack_bf16_block(const Matrix &m, const Source &source, int first, int begin, int end) {
  int K = m.padded_inputs, block = begin / 16, inputs = m.inputs;
  uint32_t *out = (uint32_t *)m.data + size_t(block) * size_t(K / 2) * 16;
  std::vector<uint16_t> copies;
  const uint16_t *rows[16];
  bool direct = source.type == BFLOAT16 && inputs == K;
  if (!direct) copies.resize(size_t(16 * K));
  std::vector<float> wide(size_t(direct ? 0 : inputs));
  for (int row = begin; row < end; row++) {
    uint16_t *copy = direct ? nullptr : &copies[size_t(row % 16 * K)];
    rows[row % 16] = direct ? (const uint16_t *)source.data + (row - first) * source.stride : copy;
    if (direct) continue;
    source.read(row - first, inputs, wide.data());
    for (int k = 0; k < inputs; k++) copy[k] = to_bfloat(wide[size_t(k)]);
  }
  int from = begin % 16, to = (end - 1) % 16 + 1;
  for (int p = 0; p < K / 2; p++)
    for (int n = from; n < to; n++) memcpy(out + size_t(p) * 16 + n, rows[n] + 2 * p, 4);
  if (end == m.outputs)
    for (int p = 0; p < K / 2; p++)
      for (int n = to; n < 16; n++) out[size_t(p) * 16 + size_t(n)] = 0;
}

void pack_quant_row(const Matrix &m, const Source &source, int first, int row) {
  std::vector<float> values(size_t(m.padded_inputs), 0.f);
  source.read(row - first, m.inputs, values.data());
  const Kernels &set = kernels();
  QuantRow out(m, row);
  uint8_t bytes[32];
  for (int g = 0; g < m.padded_inputs / m.group; g++) {
    float scale, min;
    set.quantize_group(&values[size_t(g * m.group)], m.kind, bytes, &scale, &min);
    out.put_scale(g, scale, min);
    for (int i = 0; i < m.group; i++) out.put(g * m.group + i, bytes[i]);
  }
}

// Packs one row of codes, whose groups may be larger than the matrix's.
void pack_codes_row(const Matrix &m, const kv_codes &source, int from, int row) {
  QuantRow out(m, row);
  const uint8_t *codes = source.codes + from * source.stride;
  const float *scale = source.scale + from * source.groups;
  const float *min = source.min ? source.min + from * source.groups : nullptr;
  int width = m.inputs / source.groups;
  for (int k = 0; k < m.padded_inputs; k++) out.put(k, k < m.inputs ? codes[k] : m.offset);
  for (int g = 0; g < m.padded_inputs / m.group; g++) {
    bool inside = g * m.group < m.inputs;
    size_t at = inside ? size_t(g * m.group / width) : 0;
    float s = inside ? scale[at] : 0.f;
    out.put_scale(g, s, (inside && min ? min[at] : 0.f) + s * float(m.offset - source.offset));
  }
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

void kv_pack(const Matrix *matrix, const void *data, int32_t type, int64_t stride, int32_t first, int32_t count) {
  const Matrix &m = *matrix;
  Source source{data, type, stride};
  int begin = first / 16, end = (first + count + 15) / 16;
  parallel(end - begin, [&](int i) {
    int from = std::max(first, (begin + i) * 16), to = std::min(first + count, (begin + i + 1) * 16);
    if (m.kind == BF16) return pack_bf16_block(m, source, first, from, to);
    for (int row = from; row < to; row++) pack_quant_row(m, source, first, row);
  });
}

void kv_pack_codes(const Matrix *matrix, const kv_codes *source, int32_t first, int32_t count) {
  int begin = first / 16, end = (first + count + 15) / 16;
  parallel(end - begin, [&](int i) {
    for (int row = std::max(first, (begin + i) * 16); row < std::min(first + count, (begin + i + 1) * 16); row++)
      pack_codes_row(*matrix, *source, row - first, row);
  });
}
