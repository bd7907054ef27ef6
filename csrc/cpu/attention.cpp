#include "attention.h"

#include <math.h>

#include <algorithm>
#include <vector>

#include "bfloat.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int PARTIAL_BUFFER = 1, SCRATCH_BUFFER = 2;
constexpr int ROWS_AT_ONCE = 112;  // queries times shared heads: enough to pay for packing the keys
constexpr int KEYS_WORTH_SPLITTING = 256;

// Combines the partial results of several ranges of keys.
void merge(const Attend *parts, int count) {
  const Attend &a = parts[0];
  int d = a.head_dim;
  for (int row = 0; row < a.num_queries * a.shared; row++) {
    float most = -INFINITY, total = 0;
    for (int i = 0; i < count; i++) most = std::max(most, parts[i].partial[size_t(row) * (d + 2) + d]);
    std::vector<float> sums(size_t(d), 0.f);
    for (int i = 0; i < count; i++) {
      const float *part = parts[i].partial + size_t(row) * (d + 2);
      float weight = part[d] > -INFINITY ? expf(part[d] - most) : part[d + 1];  // 0, or NaN, which stays NaN
      total += part[d + 1] * weight;
      for (int j = 0; j < d; j++) sums[size_t(j)] += part[j] * weight;
    }
    uint16_t *out = a.out + size_t(row / a.shared) * a.out_stride + size_t(row % a.shared) * d;
    for (int j = 0; j < d; j++) out[j] = to_bfloat(total == 0 ? 0.f : sums[size_t(j)] / total);
  }
}

// One task for each key head and some queries of a sequence.
void add_tasks(const kv_layer &layer, const kv_step &step, const uint16_t *query, size_t stride, uint16_t *out, int s,
               std::vector<Attend> &tasks) {
  const kv_group &group = step.groups[layer.group];
  int begin = step.query_start[s], count = step.query_start[s + 1] - begin, length = step.lengths[s];
  int shared = layer.heads / layer.kv_heads, at_once = std::max(1, ROWS_AT_ONCE / shared);
  Attend a{};
  a.query_stride = stride;
  a.shared = shared;
  a.head_dim = layer.head_dim;
  a.window = layer.window;
  a.causal = step.causal;
  a.scale = layer.scale;
  a.softcap = layer.softcap;
  a.cache = layer.cache;
  a.table = group.tables + step.rows[s] * group.table_stride;
  a.out_stride = size_t(layer.heads) * size_t(layer.head_dim);
  for (int q = 0; q < count; q += at_once) {
    a.num_queries = std::min(at_once, count - q);
    a.first_position = length - count + q;
    a.key_end = step.causal ? std::min(length, a.first_position + a.num_queries) : length;
    a.key_begin = layer.window ? std::max(0, a.first_position + 1 - layer.window) / 16 * 16 : 0;
    for (int head = 0; head < layer.kv_heads; head++) {
      size_t first_head = size_t(head) * size_t(shared * layer.head_dim);
      a.kv_head = head;
      a.query = query + size_t(begin + q) * stride + first_head;
      a.out = out + size_t(begin + q) * a.out_stride + first_head;
      tasks.push_back(a);
    }
  }
}

void run(const Kernels &set, std::vector<Attend> &tasks) {
  parallel(int(tasks.size()), [&](int i) {
    Attend task = tasks[size_t(i)];
    size_t bytes = set.attend_scratch(task.num_queries * task.shared, task.head_dim);
    task.scratch = (float *)thread_buffer(SCRATCH_BUFFER, bytes);
    set.attend(&task);
  });
}

// Few tasks over many keys: each task is split into ranges of keys.
void run_split(const Kernels &set, const std::vector<Attend> &tasks, int pieces) {
  std::vector<Attend> parts;
  std::vector<size_t> first;
  for (const Attend &task : tasks) {
    first.push_back(parts.size());
    int keys = task.key_end - task.key_begin;
    int length = std::max(KEYS_WORTH_SPLITTING, ((keys + pieces - 1) / pieces + 63) / 64 * 64);
    for (int begin = task.key_begin; begin < task.key_end; begin += length) {
      Attend part = task;
      part.key_begin = begin;
      part.key_end = std::min(task.key_end, begin + length);
      parts.push_back(part);
    }
  }
  first.push_back(parts.size());
  size_t floats = 0;
  for (const Attend &part : parts) floats += size_t(part.num_queries * part.shared) * size_t(part.head_dim + 2);
  float *memory = (float *)thread_buffer(PARTIAL_BUFFER, floats * 4);
  for (Attend &part : parts) {
    part.partial = memory;
    memory += size_t(part.num_queries * part.shared) * size_t(part.head_dim + 2);
  }
  run(set, parts);
  for (size_t i = 0; i < tasks.size(); i++)
    if (first[i] < first[i + 1]) merge(&parts[first[i]], int(first[i + 1] - first[i]));
}

}  // namespace

void attention(const kv_layer &layer, const kv_step &step, const uint16_t *query, size_t stride, uint16_t *out) {
  std::vector<Attend> tasks;
  for (int s = 0; s < step.sequences; s++) add_tasks(layer, step, query, stride, out, s, tasks);
  int longest = 0, wanted = 4 * pool_threads();
  for (const Attend &task : tasks) longest = std::max(longest, task.key_end - task.key_begin);
  int pieces = tasks.empty() ? 0 : (wanted + int(tasks.size()) - 1) / int(tasks.size());
  if (pieces > 1 && pool_threads() > 1 && longest >= 2 * KEYS_WORTH_SPLITTING) {
    run_split(kernels(), tasks, pieces);
  } else {
    run(kernels(), tasks);
  }
}

}  // namespace kvasir

void kv_attention(const kv_layer *layer, const kv_step *step, const uint16_t *query, int64_t stride, uint16_t *out) {
  kvasir::attention(*layer, *step, query, size_t(stride), out);
}
