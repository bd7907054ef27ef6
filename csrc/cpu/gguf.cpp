// Copies rows of a GGUF file into packed matrices: the same numbers and scales in another order. A matrix with rows of
// several types uses the widest format: 8 bits hold 4, scales for 16 inputs hold those for 32, and a min holds an offset.
#include <algorithm>
#include <iterator>

#include "kvasir_cpu.h"
#include "pack.h"
#include "pool.h"

namespace kvasir {
namespace {

// The numbers of a file's block and their groups: value = (number - offset) * scale + min.
struct Block {
  uint8_t number[256];
  float scale[16], min[16];
};

float half_at(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return half_to_float(h);
}

void fill(Block &b, float scale, float min) { b.scale[0] = scale, b.min[0] = min; }

void read_q4_0(const uint8_t *p, Block &b) {
  fill(b, half_at(p), 0);
  for (int i = 0; i < 16; i++) b.number[i] = p[2 + i] & 15, b.number[16 + i] = p[2 + i] >> 4;
}

void read_q4_1(const uint8_t *p, Block &b) {
  fill(b, half_at(p), half_at(p + 2));
  for (int i = 0; i < 16; i++) b.number[i] = p[4 + i] & 15, b.number[16 + i] = p[4 + i] >> 4;
}

void read_5_bits(const uint8_t *bits, const uint8_t *p, Block &b) {
  uint32_t high;
  memcpy(&high, bits, 4);
  for (int i = 0; i < 16; i++) {
    b.number[i] = uint8_t((p[i] & 15) | (high >> i & 1) << 4);
    b.number[16 + i] = uint8_t(p[i] >> 4 | (high >> (16 + i) & 1) << 4);
  }
}

void read_q5_0(const uint8_t *p, Block &b) {
  fill(b, half_at(p), 0);
  read_5_bits(p + 2, p + 6, b);
}

void read_q5_1(const uint8_t *p, Block &b) {
  fill(b, half_at(p), half_at(p + 2));
  read_5_bits(p + 4, p + 8, b);
}

void read_q8_0(const uint8_t *p, Block &b) {
  fill(b, half_at(p), 0);
  for (int i = 0; i < 32; i++) b.number[i] = uint8_t(int8_t(p[2 + i]) + 128);
}

void read_q2_k(const uint8_t *p, Block &b) {
  const uint8_t *scales = p, *q = p + 16;
  float d = half_at(p + 80), dmin = half_at(p + 82);
  for (int g = 0; g < 16; g++) {
    b.scale[g] = d * float(scales[g] & 15);
    b.min[g] = -dmin * float(scales[g] >> 4);
    for (int i = 0; i < 16; i++) b.number[16 * g + i] = q[32 * (g / 8) + 16 * (g % 2) + i] >> (2 * (g % 8 / 2)) & 3;
  }
}

void read_q3_k(const uint8_t *p, Block &b) {
  const uint8_t *mask = p, *q = p + 32, *packed = p + 96;
  float d = half_at(p + 108);
  for (int g = 0; g < 16; g++) {
    int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4, high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
    b.scale[g] = d * float((low | high << 4) - 32);
    b.min[g] = 0;
    for (int i = 0; i < 16; i++) {
      int at = 16 * (g % 2) + i, bit = g / 2;
      b.number[16 * g + i] = uint8_t((q[32 * (g / 8) + at] >> (2 * (g % 8 / 2)) & 3) | (mask[at] >> bit & 1) << 2);
    }
  }
}

// Scale and min of group g of the eight that Q4_K and Q5_K store in 12 bytes.
void read_k_scales(const uint8_t *p, float d, float dmin, Block &b) {
  for (int g = 0; g < 8; g++) {
    int scale = g < 4 ? p[g] & 63 : (p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
    int min = g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | (p[g] >> 6) << 4;
    b.scale[g] = d * float(scale);
    b.min[g] = -dmin * float(min);
  }
}

void read_q4_k(const uint8_t *p, Block &b) {
  read_k_scales(p + 4, half_at(p), half_at(p + 2), b);
  for (int i = 0; i < 256; i++) b.number[i] = p[16 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

void read_q5_k(const uint8_t *p, Block &b) {
  read_k_scales(p + 4, half_at(p), half_at(p + 2), b);
  const uint8_t *high = p + 16, *q = p + 48;
  for (int i = 0; i < 256; i++)
    b.number[i] = uint8_t((q[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15) | (high[i % 32] >> (i / 32) & 1) << 4);
}

void read_q6_k(const uint8_t *p, Block &b) {
  const uint8_t *low = p, *high = p + 128, *scales = p + 192;
  float d = half_at(p + 208);
  for (int i = 0; i < 256; i++) {
    int half = i / 128, part = i % 128 / 32, at = i % 32;
    int four = low[64 * half + 32 * (part % 2) + at] >> (part / 2 * 4) & 15;
    b.number[i] = uint8_t(four | (high[32 * half + at] >> (2 * part) & 3) << 4);
  }
  for (int g = 0; g < 16; g++) b.scale[g] = d * float(int8_t(scales[g])), b.min[g] = 0;
}

struct Type {
  int number, length, bytes, group, offset;
  void (*read)(const uint8_t *, Block &);
};

const Type TYPES[] = {
    {2, 32, 18, 32, 8, read_q4_0},    {3, 32, 20, 32, 0, read_q4_1},    {6, 32, 22, 32, 16, read_q5_0},
    {7, 32, 24, 32, 0, read_q5_1},    {8, 32, 34, 32, 128, read_q8_0},  {10, 256, 84, 16, 0, read_q2_k},
    {11, 256, 110, 16, 4, read_q3_k}, {12, 256, 144, 32, 0, read_q4_k}, {13, 256, 176, 32, 0, read_q5_k},
    {14, 256, 210, 16, 32, read_q6_k},
};

void pack_row(const Matrix &m, const Type &type, const uint8_t *source, int row) {
  QuantRow out(m, row);
  Block block;
  for (int begin = 0; begin < m.inputs; begin += type.length, source += type.bytes) {
    type.read(source, block);
    for (int i = 0; i < type.length; i++) out.put(begin + i, block.number[i]);
    for (int i = 0; i < type.length; i += m.group) {
      float scale = block.scale[i / type.group], min = block.min[i / type.group];
      out.put_scale((begin + i) / m.group, scale, min + scale * float(m.offset - type.offset));
    }
  }
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

int32_t kv_pack_gguf(const Matrix *matrix, const uint8_t *source, int32_t number, int64_t stride, int32_t first,
                     int32_t count) {
  const Type *type = std::find_if(std::begin(TYPES), std::end(TYPES), [&](const Type &t) { return t.number == number; });
  if (type == std::end(TYPES)) return 0;
  int begin = first / 16, end = (first + count + 15) / 16;
  parallel(end - begin, [&](int i) {
    for (int row = std::max(first, (begin + i) * 16); row < std::min(first + count, (begin + i + 1) * 16); row++)
      pack_row(*matrix, *type, source + (row - first) * stride, row);
  });
  return 1;
}
