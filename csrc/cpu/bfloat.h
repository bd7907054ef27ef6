// Conversion of single bfloat16 numbers, where a kernel is not worth it.
#pragma once

#include <stdint.h>
#include <string.h>

namespace kvasir {

inline float from_bfloat(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float y;
  memcpy(&y, &u, 4);
  return y;
}

inline uint16_t to_bfloat(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 64);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

}  // namespace kvasir
