// Writing into packed matrices, one number at a time. See kernels.h for the layouts.
#pragma once

#include <string.h>

#include "kernels.h"

namespace kvasir {

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, u;
  if (exponent == 0) {
    float tiny = float(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  u = exponent == 31 ? sign | 0x7f800000 | fraction << 13 : sign | (exponent + 112) << 23 | fraction << 13;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Rounds to the nearest float16; larger numbers become the largest float16.
inline uint16_t float_to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  uint16_t sign = uint16_t(u >> 16 & 0x8000);
  float size = x < 0 ? -x : x;
  if (!(size < 65504.f)) return size != size ? uint16_t(sign | 0x7e00) : uint16_t(sign | 0x7bff);
  if (size < 0x1p-14f) {
    float scaled = size * 0x1p24f;
    uint32_t whole = uint32_t(scaled);
    float rest = scaled - float(whole);
    whole += rest > 0.5f || (rest == 0.5f && (whole & 1));
    return uint16_t(sign | whole);
  }
  uint32_t magnitude = u & 0x7fffffff;
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((magnitude >> 13) - (112u << 10)));
}

// One row of a packed matrix of 8, 6 or 4 bits.
class QuantRow {
 public:
  QuantRow(const Matrix &m, int row) : m_(m), block_(size_t(row) / 16), n_(size_t(row) % 16) {}

  void put(int k, int value) {
    uint8_t *data = (uint8_t *)m_.data;
    size_t K = size_t(m_.padded_inputs), at = size_t(k);
    if (m_.kind == Q8) {
      data[(block_ * (K / 4) + at / 4) * 64 + n_ * 4 + at % 4] = uint8_t(value);
      return;
    }
    data += (block_ * (K / 32) + at / 32) * (m_.kind == Q6 ? 384 : 256) + n_ * 4 + at % 4;
    size_t quad = at % 16 / 4, half = at % 32 / 16;
    put_bits(data[quad * 64], 4 * half, 15, value);
    if (m_.kind == Q6) put_bits(data[256 + half * 64], 2 * quad, 3, value >> 4);
  }

  // Group g: value = (number - offset) * scale + min
  void put_scale(int g, float scale, float min) {
    size_t at = (block_ * size_t(m_.padded_inputs / m_.group) + size_t(g)) * 16 + n_;
    ((uint16_t *)m_.scale)[at] = float_to_half(scale);
    if (m_.min) ((uint16_t *)m_.min)[at] = float_to_half(min);
  }

 private:
  static void put_bits(uint8_t &byte, size_t shift, int mask, int value) {
    byte = uint8_t((byte & ~(mask << shift)) | (value & mask) << shift);
  }

  const Matrix &m_;
  size_t block_, n_;
};

}  // namespace kvasir
