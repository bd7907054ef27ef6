// Runs a whole decoder in one call. kvasir/models/native.py describes its layers, those of models/decoder_layer.py.
#include <string.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "kvasir_cpu.h"
#include "linear.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int STATES_BUFFER = 3;
constexpr int FEW_TOKENS = 4;  // fewer tokens are not worth waking other threads

template <class F>
void each_token(int tokens, const F &f) {
  if (tokens <= FEW_TOKENS) {
    for (int t = 0; t < tokens; t++) f(t);
  } else {
    parallel(tokens, f);
  }
}

void rope_store(const kv_layer &layer, const kv_step &step, uint16_t *qkv, size_t stride) {
  const Kernels &set = kernels();
  const int64_t *slots = step.groups[layer.group].slots;
  int q = layer.heads * layer.head_dim, k = layer.kv_heads * layer.head_dim;
  each_token(step.tokens, [&](int t) {
    uint16_t *row = qkv + size_t(t) * stride;
    if (layer.whole_norm) {
      set.normalise(&layer.q_norm, row, row, q);
      set.normalise(&layer.k_norm, row + q, row + q, k);
    }
    const Norm *q_norm = layer.whole_norm ? nullptr : &layer.q_norm, *k_norm = layer.whole_norm ? nullptr : &layer.k_norm;
    StoreToken one{row,    step.positions[t], slots[t],       layer.heads, layer.kv_heads, layer.head_dim,
                   q_norm, k_norm,            layer.rotation, layer.cache};
    set.store_token(&one);
  });
}

// The hidden states between layers, and buffers for intermediate results.
struct States {
  uint16_t *hidden, *residual, *normed, *other, *qkv, *seen, *inner;
};

States take_memory(const kv_decoder &decoder, int tokens) {
  size_t qkv = 0, seen = 0, inner = 0, hidden = size_t(decoder.hidden), n = size_t(tokens);
  for (int i = 0; i < decoder.num_layers; i++) {
    const kv_layer &layer = decoder.layers[i];
    qkv = std::max(qkv, size_t(layer.qkv.outputs));
    seen = std::max(seen, size_t(layer.heads * layer.head_dim));
    inner = std::max(inner, size_t(layer.up.outputs));
  }
  auto *p = (uint16_t *)thread_buffer(STATES_BUFFER, n * 2 * (4 * hidden + qkv + seen + inner) + 8 * 64);
  auto take = [&](size_t width) {
    uint16_t *here = p;
    p += (n * width + 31) / 32 * 32;
    return here;
  };
  return {take(hidden), take(hidden), take(hidden), take(hidden), take(qkv), take(seen), take(inner)};
}

class Forward {
 public:
  Forward(const kv_decoder &decoder, const kv_step &step)
      : decoder_(decoder), step_(step), set_(kernels()), s_(take_memory(decoder, step.tokens)) {
    if (step.adapters) groups_ = group_tokens(step.adapters, step.tokens);
  }

  void run(uint16_t *out) {
    embed();
    for (top_ = 0; top_ < decoder_.num_layers; top_++) run_layer(decoder_.layers[top_]);
    add_norm(decoder_.final_norm, s_.hidden, out);
  }

 private:
  void embed() {
    size_t hidden = size_t(decoder_.hidden);
    each_token(step_.tokens, [&](int t) {
      uint16_t *row = s_.hidden + size_t(t) * hidden;
      set_.expand_row(&decoder_.embedding, int32_t(step_.ids[t]), row);
      if (decoder_.embedding_scale != 1.f) set_.scaled(row, decoder_.embedding_scale, decoder_.hidden);
      if (!decoder_.positions) return;
      const uint16_t *place = decoder_.positions + size_t(step_.positions[t] + decoder_.position_offset) * hidden;
      set_.added(row, place, row, decoder_.hidden);
    });
  }

  void run_layer(const kv_layer &layer) {
    switch (layer.arrangement) {
      case 1: return run_parallel(layer);
      case 2: return run_sums(layer);
    }
    add_norm(layer.attention_norm, s_.hidden, s_.normed);
    attend(layer, s_.normed, s_.hidden);
    finish_part(layer, layer.attention_post_norm);
    add_norm(layer.mlp_norm, s_.hidden, s_.normed);
    feed_forward(layer, s_.normed, s_.hidden);
    finish_part(layer, layer.mlp_post_norm);
  }

  void run_parallel(const kv_layer &layer) {
    add_norm(layer.attention_norm, s_.hidden, s_.normed);
    attend(layer, s_.normed, s_.other);
    if (layer.mlp_norm.kind) normalise(layer.mlp_norm, s_.residual, s_.normed);
    feed_forward(layer, s_.normed, s_.hidden);
    add(s_.other, s_.hidden);
  }

  void run_sums(const kv_layer &layer) {
    attend(layer, s_.hidden, s_.other);
    add(s_.other, s_.hidden);
    normalise(layer.attention_post_norm, s_.hidden, s_.hidden);
    feed_forward(layer, s_.hidden, s_.other);
    add(s_.other, s_.hidden);
    normalise(layer.mlp_post_norm, s_.hidden, s_.hidden);
  }

  void attend(const kv_layer &layer, const uint16_t *x, uint16_t *out) {
    size_t hidden = size_t(decoder_.hidden), width = size_t(layer.qkv.outputs);
    size_t seen = size_t(layer.heads * layer.head_dim);
    linear(layer.qkv, x, hidden, step_.tokens, s_.qkv, width);
    change(layer.qkv_adapters, x, hidden, s_.qkv, width);
    rope_store(layer, step_, s_.qkv, width);
    if (step_.only_last && top_ == decoder_.num_layers - 1) keep_last_tokens(width);
    attention(layer, step_, s_.qkv, width, s_.seen);
    linear(layer.o, s_.seen, seen, step_.tokens, out, hidden);
    change(layer.o_adapters, s_.seen, seen, out, hidden);
  }

  // From here on only the last token of each sequence is computed: the keys of the others are stored.
  void keep_last_tokens(size_t width) {
    size_t hidden = size_t(decoder_.hidden);
    for (int s = 0; s < step_.sequences; s++) {
      size_t from = size_t(step_.query_start[s + 1] - 1), to = size_t(s);
      memmove(s_.qkv + to * width, s_.qkv + from * width, 2 * width);
      for (uint16_t *states : {s_.hidden, s_.residual, s_.normed})
        memmove(states + to * hidden, states + from * hidden, 2 * hidden);
      if (step_.adapters) last_adapters_.push_back(step_.adapters[from]);
    }
    if (step_.adapters) groups_ = group_tokens(last_adapters_.data(), step_.sequences);
    starts_.resize(size_t(step_.sequences) + 1);
    std::iota(starts_.begin(), starts_.end(), 0);
    step_.query_start = starts_.data();
    step_.tokens = step_.sequences;
  }

  void feed_forward(const kv_layer &layer, const uint16_t *x, uint16_t *out) {
    size_t hidden = size_t(decoder_.hidden), inner = size_t(layer.down.inputs);
    if (step_.adapters && layer.up_adapters.shrink) return feed_adapted(layer, x, out);
    linear(layer.up, x, hidden, step_.tokens, s_.inner, inner, layer.gated ? GATE : ACTIVATE, layer.activation);
    linear(layer.down, s_.inner, inner, step_.tokens, out, hidden);
  }

  // The same, with the activation after the adapters: it stays where the product was written.
  void feed_adapted(const kv_layer &layer, const uint16_t *x, uint16_t *out) {
    size_t hidden = size_t(decoder_.hidden), width = size_t(layer.up.outputs);
    linear(layer.up, x, hidden, step_.tokens, s_.inner, width);
    change(layer.up_adapters, x, hidden, s_.inner, width);
    each_token(step_.tokens, [&](int t) {
      uint16_t *row = s_.inner + size_t(t) * width;
      if (layer.gated) {
        set_.gated(row, row, layer.down.inputs, layer.activation);
      } else {
        set_.activated(row, layer.up.outputs, layer.activation);
      }
    });
    linear(layer.down, s_.inner, width, step_.tokens, out, hidden);
    change(layer.down_adapters, s_.inner, width, out, hidden);
  }

  void change(const Adapters &adapters, const uint16_t *x, size_t stride, uint16_t *y, size_t y_stride) {
    if (step_.adapters && adapters.shrink) adapt(adapters, groups_, x, stride, y, y_stride);
  }

  // What attention or feed-forward adds to the residual, with the model's post norm and scale.
  void finish_part(const kv_layer &layer, const Norm &norm) {
    if (norm.kind) normalise(norm, s_.hidden, s_.hidden);
    if (layer.residual_scale == 1.f) return;
    rows([&](size_t at) { set_.scaled(s_.hidden + at, layer.residual_scale, decoder_.hidden); });
  }

  void add_norm(const Norm &norm, const uint16_t *x, uint16_t *out) {
    rows([&](size_t at) { set_.norm(&norm, x + at, s_.residual + at, has_residual_, out + at, decoder_.hidden); });
    has_residual_ = true;
  }

  void normalise(const Norm &norm, const uint16_t *x, uint16_t *out) {
    rows([&](size_t at) { set_.normalise(&norm, x + at, out + at, decoder_.hidden); });
  }

  void add(const uint16_t *x, uint16_t *y) {
    rows([&](size_t at) { set_.added(x + at, y + at, y + at, decoder_.hidden); });
  }

  template <class F>
  void rows(const F &f) {
    each_token(step_.tokens, [&](int t) { f(size_t(t) * size_t(decoder_.hidden)); });
  }

  const kv_decoder &decoder_;
  kv_step step_;
  const Kernels &set_;
  States s_;
  int top_ = 0;  // the running layer
  std::vector<int32_t> starts_, last_adapters_;
  TokenGroups groups_;  // tokens that use adapters
  bool has_residual_ = false;
};

}  // namespace
}  // namespace kvasir

using namespace kvasir;

void kv_forward(const kv_decoder *decoder, const kv_step *step, uint16_t *out) { Forward(*decoder, *step).run(out); }

void kv_rope_store(const kv_layer *layer, const kv_step *step, uint16_t *qkv) {
  size_t heads = size_t(layer->heads + 2 * layer->kv_heads);
  rope_store(*layer, *step, qkv, heads * size_t(layer->head_dim));
}

int32_t kv_expand_rows(const Matrix *matrix, const int64_t *rows, int32_t count, uint16_t *out) {
  const Kernels &set = kernels();
  if (std::any_of(rows, rows + count, [&](int64_t row) { return row < 0 || row >= matrix->outputs; })) return 0;
  each_token(count, [&](int i) { set.expand_row(matrix, int32_t(rows[i]), out + size_t(i) * size_t(matrix->inputs)); });
  return 1;
}

void kv_norm(const Norm *norm, const uint16_t *x, int32_t rows, int32_t size, uint16_t *out) {
  const Kernels &set = kernels();
  each_token(rows, [&](int i) { set.normalise(norm, x + size_t(i) * size_t(size), out + size_t(i) * size_t(size), size); });
}

void kv_add_norm(const Norm *norm, const uint16_t *x, uint16_t *residual, int32_t rows, int32_t size, uint16_t *out) {
  const Kernels &set = kernels();
  each_token(rows, [&](int i) {
    size_t at = size_t(i) * size_t(size);
    set.norm(norm, x + at, residual + at, 1, out + at, size);
  });
}

void kv_gated(const uint16_t *x, int32_t rows, int32_t size, int32_t activation, uint16_t *out) {
  const Kernels &set = kernels();
  each_token(rows, [&](int i) { set.gated(x + size_t(i) * 2 * size_t(size), out + size_t(i) * size_t(size), size, activation); });
}

#if !defined(KVASIR_SOURCES)
#define KVASIR_SOURCES "unknown"
#endif
const char *kv_sources() { return KVASIR_SOURCES; }

int64_t kv_layout() {
  return int64_t(sizeof(kv_layer)) << 40 | int64_t(sizeof(kv_decoder)) << 20 | int64_t(sizeof(kv_step) << 10) |
         int64_t(sizeof(Matrix));
}
