// The functions of one instruction set, each of which does a piece of work on one thread. linear.cpp, attention.cpp and
// decoder.cpp split the work into pieces for the threads. Plain data only, so that every file can include this.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvasir {

// How a matrix is packed. All are cut into blocks of 16 outputs; inputs are padded with zeros to a multiple of 32.
//   BF16   [block][input / 2][16 outputs][2 inputs] bfloat16
//   Q8     [block][input / 4][16][4] bytes;  value = (byte - offset) * scale + min
//   Q4     [block][input / 32][4][16][4] bytes: byte (i, n, j) has input 4 i + j in its low half and 16 + 4 i + j in its
//          high half;  value = (half byte - offset) * scale + min
//   Q6     [block][input / 32] of 384 bytes: the low four bits as in Q4, then [2][16][4] bytes with the high two: byte
//          (h, n, j) has those of input 16 h + 4 i + j in its bits 2 i and 2 i + 1
//   PLAIN  [output][input] bfloat16, for reading rows, not for products
// Scales and mins, if any, are [block][input / group][16] float16.
enum Kind : int32_t { BF16 = 0, Q8 = 1, Q4 = 2, PLAIN = 3, Q6 = 4 };

struct Matrix {
  int32_t kind;
  int32_t outputs, inputs, padded_inputs;
  int32_t group;   // inputs that share a scale: 16 or 32
  int32_t offset;  // the number that means zero: 8, 32 or 128; 0 if there are mins
  const void *data;
  const uint16_t *scale, *min;
  const uint16_t *bias;  // bfloat16; null: none
  // What is done to a row of inputs before it is multiplied: input order[k] takes place k, times factor[order[k]].
  const int32_t *order;  // null: every input stays
  const float *factor;   // null: ones
};

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };
constexpr int32_t CLAMPED = 4;  // of experts alone: see kv_routes

// Rows of inputs, as the kernels read them: in tiles, of which the first `tall` have `tile` rows and the others one less.
//   bfloat16: [tile][input / 2][tile rows][2]
//   8 bits:   [tile][input / 4][tile rows][4], a scale for 32 inputs [tile][input / 32][tile rows] and the sums of
//             16 numbers [tile][input / 16][tile rows]; `starts` are those of 32, times
//             -offset of the matrix, `weighted` the same times their scale
// AMX needs its tiles of 16 rows row by row, [tile][tile rows][input].
struct Rows {
  int32_t count, tiles, tile, tall, padded_inputs;
  uint16_t *bf16;
  int8_t *q;
  float *scale, *weighted;
  int32_t *sums, *starts;
  int32_t offset;

  int32_t height(int32_t t) const { return t < tall ? tile : tile - 1; }
  int32_t begin(int32_t t) const { return t * tile - (t < tall ? 0 : t - tall); }
};

struct Product {
  const Matrix *matrix;
  const Rows *rows;
  uint16_t *out;  // bfloat16
  size_t out_stride;
  int32_t gated;  // out = activation(first half) * second half; the halves are whole blocks
  int32_t activate;  // out = activation(product)
  int32_t activation;
};

// The adapters of one linear layer, by slot; kvasir/kernels/layout.py says what they compute.
constexpr int MAX_PARTS = 4;
constexpr int ADAPTER_TOKENS = 4;  // that are computed together

struct Adapters {
  int32_t slots, parts, rank, inputs, outputs;
  int32_t part_outputs[MAX_PARTS];
  const uint16_t *shrink;  // [slots][parts][rank][inputs] bfloat16; null: the layer has none
  const uint16_t *expand;  // [slots][rank][outputs]
  const float *gain, *shift;  // [slots][outputs]
  const int32_t *uses;  // [slots][2]: rank in use, whether gain and shift are
};

struct AdapterGroup {
  int32_t slot, tokens;  // at most ADAPTER_TOKENS
  const uint16_t *x[ADAPTER_TOKENS];
  uint16_t *y[ADAPTER_TOKENS];
  float *low;  // [tokens][parts * rank]: the first product
  const uint16_t *next_shrink, *next_expand;  // the factors that the thread reads next; null: unknown
};

struct Norm {
  int32_t kind;  // 0: none, 1: root mean square, 2: the same with a float32 gain, 3: mean and variance
  float eps;
  const void *gain;
  const uint16_t *bias;
};

// One layer's cache, in elements of its type. A vector of a head of 8-bit numbers is followed by its float32 scale.
struct Cache {
  void *data;
  int64_t block_stride, value_offset, token_stride, head_stride;
  int32_t block_size, is_int8;
};

struct Rotation {
  const float *table;  // [positions][size]: cosines, then sines; null: nothing is rotated
  int32_t size, interleaved;
};

// The work between the qkv product and attention, for one token.
struct StoreToken {
  uint16_t *qkv;  // queries are rotated in place
  int64_t position, slot;  // slot -1: nothing is stored
  int32_t heads, kv_heads, head_dim;
  const Norm *q_norm, *k_norm;
  Rotation rotation;
  Cache cache;
};

// Attention reads KEYS keys at a time and combines the results of segments of SEGMENT keys, both counted from the
// beginning of the text, in the order of the text. So a query's result depends neither on the queries beside it nor on how
// the keys are divided over threads.
constexpr int KEYS = 64, SEGMENT = 256;

// Queries of one sequence and one key head over some of its keys, from a multiple of KEYS on.
struct Attend {
  const uint16_t *query;  // of the first query, first of the heads that share the key head
  size_t query_stride;    // between tokens
  int32_t num_queries, shared, head_dim;
  int32_t first_position;  // of the first query
  int32_t key_begin, key_end;
  int32_t window;  // 0: none
  int32_t causal;
  float scale, softcap;  // softcap 0: none
  const float *sinks;    // of the heads that share the key head; null: none
  Cache cache;
  int32_t kv_head;
  const int32_t *table;
  uint16_t *out;  // bfloat16, or
  size_t out_stride;
  float *partial;  // [segments][queries * shared][head_dim + 2]: weighted sum, largest score, sum of weights; null: `out`
  float *scratch;
};

// The noise of one draw: token t hashes to mix((t * step ^ flip) + shift).
struct Noise {
  uint32_t step, flip, shift;
};

// The logits between two depths below the best.
struct Reach {
  int64_t count;
  double mass;   // sum of e^((x - best) * scale)
  float lowest;  // the smallest of them
};

struct Kernels {
  const char *name;
  void (*cut_rows)(const Matrix *, Rows *);  // into tiles
  void (*pack_bf16)(const uint16_t *x, size_t stride, int32_t inputs, const Rows *, int32_t tile);
  void (*pack_quant)(const uint16_t *x, size_t stride, int32_t inputs, const Rows *, int32_t tile);
  void (*product)(const Product *, int32_t block_begin, int32_t block_end);
  // x shrink^T to `low`, for a span of the rows in use of all parts; what follows to y, for a span of outputs
  void (*adapter_shrink)(const Adapters *, const AdapterGroup *, int32_t row_begin, int32_t row_end);
  void (*adapter_expand)(const Adapters *, const AdapterGroup *, int32_t begin, int32_t end);
  void (*norm)(const Norm *, const uint16_t *x, uint16_t *residual, int32_t has_residual, uint16_t *out, int32_t size);
  void (*normalise)(const Norm *, const uint16_t *x, uint16_t *out, int32_t size);
  void (*scaled)(uint16_t *x, float scale, int32_t size);
  void (*added)(const uint16_t *x, const uint16_t *y, uint16_t *out, int32_t size);
  void (*gated)(const uint16_t *x, uint16_t *out, int32_t size, int32_t activation);
  void (*activated)(uint16_t *x, int32_t size, int32_t activation);
  void (*clamped)(const uint16_t *x, uint16_t *out, int32_t size, float alpha, float limit);
  void (*store_token)(const StoreToken *);
  void (*attend)(const Attend *);
  void (*merge)(const Attend *, int32_t segments);  // partial results, to `out`
  size_t (*attend_scratch)(int32_t rows, int32_t head_dim);
  void (*expand_row)(const Matrix *, int32_t output, uint16_t *out);
  void (*quantize_group)(const float *x, int32_t kind, uint8_t *out, float *scale, float *min);
  // the first of the largest logits, and of the largest after noise; logits are float32 or bfloat16
  int32_t (*best)(const void *logits, int32_t is_float, int32_t size);
  int32_t (*drawn)(const void *logits, int32_t is_float, int32_t size, float heat, const Noise &);
  // those with depth <= (x - best) * scale < below; the first `room` of them are written to `out`
  Reach (*reach)(const void *logits, int32_t is_float, int32_t size, float best, float scale, float depth, float below,
                 float *out, int32_t room);
};

const Kernels *portable_kernels();
#if defined(__x86_64__)
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *amx_kernels();
#endif

}  // namespace kvasir
