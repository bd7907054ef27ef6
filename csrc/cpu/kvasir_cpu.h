// The library's C interface, which kvasir/kernels/cpu calls through ctypes. The caller owns all pointers; none is kept
// after a call. Matrices of activations are bfloat16, row by row.
#pragma once

#include "kernels.h"

#pragma GCC visibility push(default)
extern "C" {

// ---------------------------------------------------------------- the machine
const char *kv_instruction_set();                 // the one in use
int32_t kv_use_instruction_set(const char *name);  // 0: this CPU cannot run it, and nothing changes
const char *kv_instruction_sets();                // all that this CPU can run, best first, separated by spaces
// `cpus` has one CPU per thread; null: any. Returns how many threads the system granted.
int32_t kv_configure(int32_t threads, const int32_t *cpus);
int32_t kv_threads();

// The sizes of the structures below, which the caller compares with its own, and the hash of the sources (sources.py).
int64_t kv_layout();
const char *kv_sources();

// ---------------------------------------------------------------- packing
// Packs rows of a checkpoint's matrix (0: float32, 1: bfloat16, 2: float16) into the rows from `first` on, quantized if
// the format is.
void kv_pack(const kvasir::Matrix *, const void *source, int32_t type, int64_t stride, int32_t first, int32_t count);
// Packs rows of a GGUF file, whose type has this number there. False: the type is unknown.
int32_t kv_pack_gguf(const kvasir::Matrix *, const uint8_t *source, int32_t type, int64_t stride, int32_t first,
                     int32_t count);
// Packs codes, a byte each, that mean (code - offset) * scale + min, into the rows from `first` on. There are `groups`
// scales in a row, and the matrix's groups divide theirs.
struct kv_codes {
  const uint8_t *codes;
  int64_t stride;
  const float *scale, *min;  // [rows][groups]; min null: none
  int32_t groups, offset;
};
void kv_pack_codes(const kvasir::Matrix *, const kv_codes *, int32_t first, int32_t count);
// False: the matrix does not have one of the rows, and nothing is written.
int32_t kv_expand_rows(const kvasir::Matrix *, const int64_t *rows, int32_t count, uint16_t *out);

// ---------------------------------------------------------------- operations
void kv_linear(const kvasir::Matrix *, const uint16_t *x, int64_t stride, int32_t rows, int32_t activation, uint16_t *out);
void kv_gated_linear(const kvasir::Matrix *, const uint16_t *x, int64_t stride, int32_t rows, int32_t activation,
                     uint16_t *out);

struct kv_spans {  // parts of rows, one for each matrix: `step` numbers apart, in rows that are `stride` numbers apart
  int64_t stride, step;
};
// Multiplies each matrix with its part of every row of x, and writes the result to its part of the same row of out.
void kv_linears(const kvasir::Matrix *, int32_t count, const uint16_t *x, const kv_spans *from, int32_t rows,
                uint16_t *out, const kv_spans *to);

// Changes y, the layer's product with x, as the tokens' adapters do; a slot of -1 means none. False: there is no such
// slot, and nothing is written.
int32_t kv_adapt(const kvasir::Adapters *, const uint16_t *x, int64_t stride, const int32_t *slots, int32_t tokens,
                 uint16_t *y, int64_t y_stride);

struct kv_routes {  // each token's experts and their weights: [tokens][top_k]
  int32_t tokens, top_k;
  const int64_t *chosen;
  const float *weights;
  float alpha = 0, limit = 0;  // of the activation CLAMPED: (up + 1) * gate * sigmoid(alpha * gate), both within limit
};

// The weighted sums of the chosen experts' down(activation(gate) * up), [tokens][hidden]. All experts have the same size.
// False: a token's expert does not exist, and nothing is written.
int32_t kv_experts(const kvasir::Matrix *gate_up, const kvasir::Matrix *down, int32_t experts, const kv_routes *,
                   const uint16_t *x, int32_t activation, uint16_t *out);
void kv_norm(const kvasir::Norm *, const uint16_t *x, int32_t rows, int32_t size, uint16_t *out);
// residual += x; out = its norm
void kv_add_norm(const kvasir::Norm *, const uint16_t *x, uint16_t *residual, int32_t rows, int32_t size, uint16_t *out);
void kv_gated(const uint16_t *x, int32_t rows, int32_t size, int32_t activation, uint16_t *out);

struct kv_group {  // a group of layers that share block tables
  const int64_t *slots;
  const int32_t *tables;
  int64_t table_stride;
};

struct kv_step {
  int32_t tokens, sequences, causal, num_groups;
  int32_t only_last;  // compute only the states of each sequence's last token; see Transformer.forward
  const int64_t *ids, *positions, *rows;
  const int32_t *query_start, *lengths;
  const kv_group *groups;
  const int32_t *adapters;  // [tokens] slots; null: no token uses an adapter
};

struct kv_layer {
  kvasir::Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
  kvasir::Matrix qkv, o, up, down;
  kvasir::Adapters qkv_adapters, o_adapters, up_adapters, down_adapters;
  kvasir::Rotation rotation;
  kvasir::Cache cache;
  int32_t heads, kv_heads, head_dim, window, group;
  int32_t whole_norm;   // q_norm and k_norm are over all heads as one vector
  int32_t gated, activation;
  int32_t arrangement;  // 0: LayerSpec, 1: ParallelLayerSpec, 2: PostNormLayerSpec (kvasir/models/spec.py)
  float scale, softcap, residual_scale;
  const float *sinks;   // [heads]: a further score of each head's softmax, without a value; null: none
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

struct kv_rows {  // of the running requests
  int32_t *num_computed;
  const int32_t *next_token, *tables;
  int64_t table_stride;
  int32_t block_size;
};

struct kv_step_tokens {
  int64_t *ids, *positions, *slots;  // of each token
  int32_t *query_start, *lengths;
};

// Also counts the tokens as computed. A token id below 0 means the row's next token. False: the number of ids is not the
// sum of the sequences' tokens, and nothing changes.
int32_t kv_step_inputs(const kv_rows *, const int64_t *rows, const int32_t *num_tokens, const int32_t *token_ids,
                       int32_t sequences, int32_t tokens, kv_step_tokens *out);
struct kv_lookup {  // see reference.lookup_drafts
  int32_t drafts, shortest, longest, latest;
};

// `lengths` are at least 1.
void kv_lookup_drafts(const int32_t *history, int64_t stride, const int64_t *rows, const int32_t *lengths, int32_t count,
                      const kv_lookup *how, int32_t *drafts, int32_t *counts);

struct kv_draft_rows {  // of all rows
  const int32_t *drafts, *counts;
  int32_t *num_computed, *next_token;
};

// See reference.accept_drafts; `size` drafts are a row's most.
void kv_accept_drafts(const int32_t *tokens, const int64_t *rows, const int32_t *starts, const int32_t *lines,
                      int32_t count, int32_t size, const kv_draft_rows *, int32_t *own, int32_t *taken);

// Normalises and rotates queries and keys within qkv, and stores keys and values in the cache.
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
  int32_t *next_token;  // receives each row's token, too
};

void kv_logit_floor(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *,
                    float *floor);
void kv_draw(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *,
             const int32_t *positions, int32_t *tokens);
}
#pragma GCC visibility pop
