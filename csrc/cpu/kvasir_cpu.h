// The library's C interface: what kvasir/kernels/cpu calls through ctypes. All pointers are the caller's; nothing is kept
// after a call. Matrices of activations are bfloat16, row after row.
#pragma once

#include "kernels.h"

#pragma GCC visibility push(default)
extern "C" {

// ---------------------------------------------------------------- the machine
const char *kv_instruction_set();                 // the one in use
int32_t kv_use_instruction_set(const char *name);  // 0: this CPU cannot, and nothing has changed
const char *kv_instruction_sets();                // all this CPU can run, best first, with spaces between
// One CPU for each thread; null: those there are. How many threads the system granted.
int32_t kv_configure(int32_t threads, const int32_t *cpus);
int32_t kv_threads();

// The sizes of the structures below, to be compared with the caller's, and what stands for the sources (build.py).
int64_t kv_layout();
const char *kv_sources();

// ---------------------------------------------------------------- packing
// Rows of a checkpoint's matrix (0: float32, 1: bfloat16, 2: float16) to rows `first` and on of a packed one, quantized
// if that is.
void kv_pack(const kvasir::Matrix *, const void *source, int32_t type, int64_t stride, int32_t first, int32_t count);
// The same from rows of a GGUF file, of the type with this number there. False: not such a type.
int32_t kv_pack_gguf(const kvasir::Matrix *, const uint8_t *source, int32_t type, int64_t stride, int32_t first,
                     int32_t count);
// False: one of the rows is not the matrix's, and nothing was written.
int32_t kv_expand_rows(const kvasir::Matrix *, const int64_t *rows, int32_t count, uint16_t *out);

// ---------------------------------------------------------------- operations
void kv_linear(const kvasir::Matrix *, const uint16_t *x, int64_t stride, int32_t rows, uint16_t *out);
void kv_gated_linear(const kvasir::Matrix *, const uint16_t *x, int64_t stride, int32_t rows, int32_t activation,
                     uint16_t *out);

struct kv_routes {  // which experts tokens go to, and how much of each they get: [tokens][top_k]
  int32_t tokens, top_k;
  const int64_t *chosen;
  const float *weights;
};

// The weighted sums of what the chosen experts, of which all are equally large, make of x, [tokens][hidden]:
// down(activation(gate) * up). False: a token has chosen one that is not there, and nothing is written.
int32_t kv_experts(const kvasir::Matrix *gate_up, const kvasir::Matrix *down, int32_t experts, const kv_routes *,
                   const uint16_t *x, int32_t activation, uint16_t *out);
void kv_norm(const kvasir::Norm *, const uint16_t *x, int32_t rows, int32_t size, uint16_t *out);
// residual += x; out = its norm
void kv_add_norm(const kvasir::Norm *, const uint16_t *x, uint16_t *residual, int32_t rows, int32_t size, uint16_t *out);
void kv_gated(const uint16_t *x, int32_t rows, int32_t size, int32_t activation, uint16_t *out);

struct kv_group {  // of layers that share block tables
  const int64_t *slots;
  const int32_t *tables;
  int64_t table_stride;
};

struct kv_step {
  int32_t tokens, sequences, causal, num_groups;
  int32_t only_last;  // of each sequence only the last token's states are wanted; see Transformer.forward
  const int64_t *ids, *positions, *rows;
  const int32_t *query_start, *lengths;
  const kv_group *groups;
};

struct kv_layer {
  kvasir::Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
  kvasir::Matrix qkv, o, up, down;
  kvasir::Rotation rotation;
  kvasir::Cache cache;
  int32_t heads, kv_heads, head_dim, window, group;
  int32_t whole_norm;   // q_norm and k_norm are over all heads as one
  int32_t gated, activation;
  int32_t arrangement;  // 0: one after the other, 1: attention and feed-forward in parallel, 2: norms over the sum
  float scale, softcap, residual_scale;
};

struct kv_decoder {
  int32_t hidden, num_layers;
  const kv_layer *layers;
  kvasir::Matrix embedding;
  float embedding_scale;
  const uint16_t *positions;  // [position][hidden]; null: none
  int32_t position_offset;
  kvasir::Norm final_norm;
};

struct kv_rows {  // of running requests
  int32_t *num_computed;
  const int32_t *next_token, *tables;
  int64_t table_stride;
  int32_t block_size;
};

struct kv_step_tokens {
  int64_t *ids, *positions, *slots;  // of each token
  int32_t *query_start, *lengths;
};

// Counts the tokens as computed. Token ids below 0 mean the row's next token. False: the sequences' tokens are not as many
// as there are ids, and nothing has changed.
int32_t kv_step_inputs(const kv_rows *, const int64_t *rows, const int32_t *num_tokens, const int32_t *token_ids,
                       int32_t sequences, int32_t tokens, kv_step_tokens *out);
// Rotates and normalises queries and keys within qkv, and puts keys and values into the cache.
void kv_rope_store(const kv_layer *, const kv_step *, uint16_t *qkv);
// Queries are the first heads of rows that lie `stride` apart; out is [tokens][heads][head_dim].
void kv_attention(const kv_layer *, const kv_step *, const uint16_t *query, int64_t stride, uint16_t *out);
// The hidden states after the last norm, [tokens][hidden], or [sequences][hidden] of their last tokens.
void kv_forward(const kv_decoder *, const kv_step *, uint16_t *out);

// ---------------------------------------------------------------- sampling: see kernels/reference.py
struct kv_sampling {
  const int64_t *rows;
  const float *temperature, *min_p, *top_p;
  const int32_t *top_k, *seeds;
  int32_t *next_token;  // where a row's token is written, too
};

void kv_logit_floor(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *,
                    float *floor);
void kv_draw(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *,
             const int32_t *positions, int32_t *tokens);
}
#pragma GCC visibility pop
