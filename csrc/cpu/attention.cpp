#include "attention.h"

#include <algorithm>
#include <vector>

#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int PARTIAL_BUFFER = 1, SCRATCH_BUFFER = 2;
constexpr int ROWS_AT_ONCE = 112;  // queries times shared heads: enough to pay for packing the keys
constexpr size_t PARTIAL_FLOATS = 16 << 20;  // of partial results at most

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
    a.key_begin = layer.window ? std::max(0, a.first_position + 1 - layer.window) / KEYS * KEYS : 0;
    for (int head = 0; head < layer.kv_heads; head++) {
      size_t first_head = size_t(head) * size_t(shared * layer.head_dim);
      a.kv_head = head;
      a.sinks = layer.sinks ? layer.sinks + head * shared : nullptr;
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

int segments(const Attend &task) {
  return task.key_end > task.key_begin ? (task.key_end - 1) / SEGMENT - task.key_begin / SEGMENT + 1 : 0;
}

size_t partial_floats(const Attend &task) {
  return size_t(task.num_queries * task.shared) * size_t(task.head_dim + 2);  // of one segment
}

// Few tasks over many keys: the segments of each are divided into `pieces`.
void run_split(const Kernels &set, std::vector<Attend> &tasks, int pieces, float *memory) {
  std::vector<Attend> parts;
  for (Attend &task : tasks) {
    int count = segments(task), step = (count + pieces - 1) / pieces;
    task.partial = memory;
    for (int i = 0; i < count; i += step) {
      Attend part = task;
      part.partial = memory + size_t(i) * partial_floats(task);
      if (i > 0) part.key_begin = (task.key_begin / SEGMENT + i) * SEGMENT;
      part.key_end = std::min(task.key_end, (task.key_begin / SEGMENT + i + step) * SEGMENT);
      parts.push_back(part);
    }
    memory += size_t(count) * partial_floats(task);
  }
  run(set, parts);
  parallel(int(tasks.size()), [&](int i) {
    Attend task = tasks[size_t(i)];
    task.scratch = (float *)thread_buffer(SCRATCH_BUFFER, size_t(task.head_dim + 2) * 4);
    set.merge(&task, segments(task));
  });
}

}  // namespace

void attention(const kv_layer &layer, const kv_step &step, const uint16_t *query, size_t stride, uint16_t *out) {
  std::vector<Attend> tasks;
  for (int s = 0; s < step.sequences; s++) add_tasks(layer, step, query, stride, out, s, tasks);
  int longest = 0, wanted = 4 * pool_threads();
  size_t floats = 0;
  for (const Attend &task : tasks) {
    longest = std::max(longest, segments(task));
    floats += size_t(segments(task)) * partial_floats(task);
  }
  int pieces = tasks.empty() ? 0 : (wanted + int(tasks.size()) - 1) / int(tasks.size());
  if (pieces > 1 && pool_threads() > 1 && longest > 1 && floats <= PARTIAL_FLOATS) {
    run_split(kernels(), tasks, pieces, (float *)thread_buffer(PARTIAL_BUFFER, floats * 4));
  } else {
    run(kernels(), tasks);
  }
}

}  // namespace kvasir

void kv_attention(const kv_layer *layer, const kv_step *step, const uint16_t *query, int64_t stride, uint16_t *out) {
  kvasir::attention(*layer, *step, query, size_t(stride), out);
}
