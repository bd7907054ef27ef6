// For x86-64 with AMX: products of bfloat16, and of bytes with more than 8 rows, in tiles, the rest as with AVX-512. A tile
// adds numbers of bfloat16 in an order of its own, so these products use tiles even for a single row. The tiles are configured by palette
// 1, which is not read from CPUID, because some virtual machines leave that empty although the tiles work.
#include "table.inl"

namespace kvasir {
bool amx_works();
}

namespace {

constexpr int AMX_ROWS = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tile 0: sums, 1: activations, 2: weights; `row_bytes` of `rows` rows of activations.
void set_tiles(int row_bytes, int rows) {
  TileConfig config;
  config.row_bytes[0] = 64, config.rows[0] = uint8_t(rows);
  config.row_bytes[1] = uint16_t(row_bytes), config.rows[1] = uint8_t(rows);
  config.row_bytes[2] = 64, config.rows[2] = uint8_t(row_bytes / 4);
  __asm__ volatile("" : : "r"(&config) : "memory");  // gcc 12 would drop the stores above
  _tile_loadconfig(&config);
}

bool in_tiles(const Rows &rows) { return rows.tile == AMX_ROWS; }

// The rows of each tile that are filled. A single tile is not filled up.
int rows_of_tiles(const Rows &rows) { return rows.count < AMX_ROWS ? rows.count : AMX_ROWS; }

void amx_pack_bf16(const uint16_t *x, size_t stride, int32_t inputs, const Rows *rows, int32_t tile) {
  if (!in_tiles(*rows)) return pack_rows_bf16(x, stride, inputs, rows, tile);
  size_t K = size_t(rows->padded_inputs);
  for (int i = 0; i < rows_of_tiles(*rows); i++) {
    int row = tile * AMX_ROWS + i;
    uint16_t *out = rows->bf16 + size_t(row) * K;
    memset(out, 0, 2 * K);
    if (row < rows->count) memcpy(out, x + size_t(row) * stride, 2 * size_t(inputs));
  }
}

void amx_pack_quant(const uint16_t *x, size_t stride, int32_t inputs, const Rows *rows, int32_t tile) {
  pack_rows_quant(x, stride, inputs, rows, tile);
  if (!in_tiles(*rows)) return;
  size_t K = size_t(rows->padded_inputs);  // [input / 4][row][4] -> [row][input], 32 inputs at a time
  uint32_t *quads = (uint32_t *)rows->q + size_t(tile) * AMX_ROWS * (K / 4), copy[8 * AMX_ROWS];
  for (size_t g = 0; g < K / 32; g++, quads += 8 * AMX_ROWS) {
    memcpy(copy, quads, sizeof copy);
    for (int i = 0; i < AMX_ROWS; i++)
      for (int j = 0; j < 8; j++) quads[i * 8 + j] = copy[j * AMX_ROWS + i];
  }
}

void amx_bf16(const Matrix &m, const Rows &rows, int tile, int block, float *out) {
  size_t K = size_t(m.padded_inputs);
  const uint16_t *a = rows.bf16 + size_t(tile) * AMX_ROWS * K, *w = (const uint16_t *)m.data + size_t(block) * K * 16;
  _tile_zero(0);
  for (size_t k = 0; k < K; k += 32) {
    _tile_loadd(1, a + k, 2 * K);
    _tile_loadd(2, w + k * 16, 64);
    _tile_dpbf16ps(0, 1, 2);
  }
  _tile_stored(0, out, 64);
}

// A tile's sums are over one group of 32 inputs; their scales are applied outside of the tiles, as in tile_quant.
void amx_q8(const Matrix &m, const Rows &rows, int tile, int block, float *out) {
  size_t K = size_t(m.padded_inputs), groups = K / 32;
  const int8_t *a = rows.q + size_t(tile) * AMX_ROWS * K;
  const uint8_t *w = (const uint8_t *)m.data + size_t(block) * K * 16;
  const float *scales = rows.scale + size_t(tile) * AMX_ROWS * groups;
  const float *weighted = rows.weighted + size_t(tile) * AMX_ROWS * groups;
  const int32_t *starts = rows.starts + size_t(tile) * AMX_ROWS * groups;
  alignas(64) int32_t whole[AMX_ROWS][16];
  f32x16 acc[AMX_ROWS] = {};
  for (size_t g = 0; g < groups; g++) {
    _tile_zero(0);
    _tile_loadd(1, a + g * 32 * AMX_ROWS, 32);
    _tile_loadd(2, w + g * 512, 64);
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, whole, 64);
    size_t at = (size_t(block) * groups + g) * 16;
    f32x16 scale = load_f16(m.scale + at);
    for (size_t i = 0; i < AMX_ROWS; i++) {
      f32x16 dots = __builtin_convertvector(load<i32x16>(whole[i]) + starts[g * AMX_ROWS + i], f32x16);
      acc[i] += dots * (scale * scales[g * AMX_ROWS + i]);
    }
    if (!m.min) continue;
    f32x16 min = load_f16(m.min + at);
    for (size_t i = 0; i < AMX_ROWS; i++) acc[i] += min * weighted[g * AMX_ROWS + i];
  }
  for (int i = 0; i < AMX_ROWS; i++) store(out + i * 16, acc[i]);
}

void amx_product(const Product *p, int32_t block_begin, int32_t block_end) {
  const Matrix &m = *p->matrix;
  const Rows &rows = *p->rows;
  if (!in_tiles(rows)) return product(p, block_begin, block_end);
  set_tiles(m.kind == kvasir::BF16 ? 64 : 32, m.kind == kvasir::BF16 ? rows_of_tiles(rows) : AMX_ROWS);
  int apart = p->gated ? m.outputs / 32 : 0, blocks = p->gated ? 2 : 1;
  alignas(64) float one[AMX_ROWS * 16], both[AMX_ROWS * 32];
  for (int block = block_begin; block < block_end; block++)
    for (int tile = 0; tile < rows.tiles; tile++) {
      for (int b = 0; b < blocks; b++) {
        (m.kind == kvasir::BF16 ? amx_bf16 : amx_q8)(m, rows, tile, block + b * apart, one);
        for (int i = 0; i < AMX_ROWS; i++) memcpy(both + (i * blocks + b) * 16, one + i * 16, 64);
      }
      finish_tile(*p, tile, block, apart, blocks, both);
    }
  _tile_release();
}

// AVX-512 multiplies matrices of 4 or 6 bits and of groups of 16: it unpacks them on the fly and needs no tiles of 16 rows.
void amx_cut_rows(const Matrix *matrix, Rows *rows) {
  bool ours = matrix->kind == kvasir::BF16 || (matrix->kind == kvasir::Q8 && matrix->group == 32);
  if (!ours || (matrix->kind == kvasir::Q8 && rows->count <= 8)) return cut_rows(matrix, rows);
  rows->tile = AMX_ROWS;
  rows->tiles = rows->tall = ceil_div(rows->count, AMX_ROWS);
}

}  // namespace

bool kvasir::amx_works() {
  alignas(64) uint16_t a[16 * 32], w[16 * 32];
  alignas(64) float out[16 * 16];
  for (int i = 0; i < 16 * 32; i++) a[i] = w[i] = 0x3f80;  // one
  Matrix m{};
  m.padded_inputs = 32, m.data = w;
  Rows rows{};
  rows.tile = AMX_ROWS, rows.bf16 = a;
  set_tiles(64, AMX_ROWS);
  amx_bf16(m, rows, 0, 0, out);
  _tile_release();
  return out[0] == 32.f && out[255] == 32.f;
}

const kvasir::Kernels *kvasir::amx_kernels() {
  static const Kernels kernels = [] {
    Kernels set = make_kernels("amx");
    set.cut_rows = amx_cut_rows;
    set.pack_bf16 = amx_pack_bf16;
    set.pack_quant = amx_pack_quant;
    set.product = amx_product;
    return set;
  }();
  return &kernels;
}
