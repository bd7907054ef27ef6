// AMX's tiles in plain C++, for machines without them: included before isa_amx.cpp, so that its code runs and is checked,
// the shapes of the tiles included. Says nothing about the real instructions, nor about their speed.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace emulated {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {
  bool configured = false;
  Config config;
  uint8_t data[8][16][64];
};

inline thread_local Tiles tiles;

inline void require(bool holds) {
  if (!holds) abort();
}

inline void configure(const void *from) {
  memcpy(&tiles.config, from, sizeof(Config));
  memset(tiles.data, 0, sizeof tiles.data);
  require(tiles.config.palette == 1);
  tiles.configured = true;
}

inline void load(int tile, const void *from, size_t stride) {
  require(tiles.configured);
  for (int row = 0; row < tiles.config.rows[tile]; row++)
    memcpy(tiles.data[tile][row], (const char *)from + size_t(row) * stride, tiles.config.row_bytes[tile]);
}

inline void store(int tile, void *to, size_t stride) {
  require(tiles.configured);
  for (int row = 0; row < tiles.config.rows[tile]; row++)
    memcpy((char *)to + size_t(row) * stride, tiles.data[tile][row], tiles.config.row_bytes[tile]);
}

inline void zero(int tile) { memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

// sums [rows][columns] += a [rows][quads] times b [quads][columns], where a quad is four bytes.
template <class Sum, class Quad>
void multiply(int sums, int a, int b, const Quad &quad) {
  const Config &c = tiles.config;
  require(tiles.configured && c.rows[sums] == c.rows[a] && c.row_bytes[sums] == c.row_bytes[b] &&
          c.row_bytes[a] == 4 * c.rows[b]);
  for (int row = 0; row < c.rows[sums]; row++)
    for (int k = 0; k < c.rows[b]; k++)
      for (int column = 0; column < c.row_bytes[sums] / 4; column++)
        ((Sum *)tiles.data[sums][row])[column] += quad(tiles.data[a][row] + 4 * k, tiles.data[b][k] + 4 * column);
}

inline float from_bf16(const uint8_t *p) {
  uint32_t u = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline void multiply_bf16(int sums, int a, int b) {
  multiply<float>(sums, a, b, [](const uint8_t *x, const uint8_t *y) {
    return from_bf16(x) * from_bf16(y) + from_bf16(x + 2) * from_bf16(y + 2);
  });
}

inline void multiply_bytes(int sums, int a, int b) {  // signed times unsigned
  multiply<int32_t>(sums, a, b, [](const uint8_t *x, const uint8_t *y) {
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) sum += int32_t(int8_t(x[i])) * int32_t(y[i]);
    return sum;
  });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_release
#define _tile_loadconfig emulated::configure
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero emulated::zero
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_dpbsud emulated::multiply_bytes
#define _tile_release() (emulated::tiles.configured = false)
