#include "adapters.h"

#include <algorithm>

#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int LOW_BUFFER = 5;
constexpr int64_t WORTH_SHARING = 1 << 15;  // products
constexpr int PIECES = 4;                   // for each thread, so that those that end first help the others
constexpr int FEWEST_ROWS = 4, FEWEST_OUTPUTS = 64;

int32_t rank_of(const Adapters &a, int32_t slot) { return a.uses[2 * slot]; }

// The groups that change this layer, and what they cost.
std::vector<AdapterGroup> changing(const Adapters &a, const TokenGroups &all, const uint16_t *x, size_t stride, uint16_t *y,
                                   size_t y_stride, int64_t &work) {
  std::vector<AdapterGroup> groups;
  size_t width = size_t(a.parts) * size_t(a.rank);
  for (size_t g = 0; g < all.slots.size(); g++) {
    int32_t slot = all.slots[g], is_moved = a.uses[2 * slot + 1];
    if (!rank_of(a, slot) && !is_moved) continue;
    AdapterGroup group{slot, int32_t(all.starts[g + 1] - all.starts[g]), {}, {}, nullptr, nullptr, nullptr};
    for (int i = 0; i < group.tokens; i++) {
      size_t token = size_t(all.tokens[all.starts[g] + size_t(i)]);
      group.x[i] = x + token * stride;
      group.y[i] = y + token * y_stride;
    }
    work += group.tokens * (int64_t(rank_of(a, slot)) * (a.inputs * a.parts + a.outputs) + is_moved * a.outputs);
    groups.push_back(group);
  }
  auto *low = (float *)thread_buffer(LOW_BUFFER, 4 * groups.size() * ADAPTER_TOKENS * width + 64);
  for (size_t g = 0; g < groups.size(); g++) {
    groups[g].low = low + g * ADAPTER_TOKENS * width;
    bool is_last = g + 1 == groups.size();
    size_t next = size_t(groups[is_last ? 0 : g + 1].slot), rank = size_t(a.rank);
    const uint16_t *expand = a.expand + next * rank * size_t(a.outputs);
    groups[g].next_shrink = is_last ? expand : a.shrink + next * width * size_t(a.inputs);
    groups[g].next_expand = is_last ? nullptr : expand;
  }
  return groups;
}

// Runs do_span(group, begin, end) over all of each group's numbers, on all threads: few groups are cut into pieces.
template <class Size, class Span>
void share(const std::vector<AdapterGroup> &groups, int fewest, const Size &size_of, const Span &do_span) {
  int pieces = (pool_threads() * PIECES - 1) / int(groups.size()) + 1;
  parallel(int(groups.size()) * pieces, [&](int task) {
    const AdapterGroup &group = groups[size_t(task / pieces)];
    int size = size_of(group), piece = std::max(fewest, ((size - 1) / pieces / fewest + 1) * fewest);
    int begin = std::min(size, task % pieces * piece), end = std::min(size, begin + piece);
    if (begin < end) do_span(group, begin, end);
  });
}

}  // namespace

TokenGroups group_tokens(const int32_t *slots, int tokens) {
  TokenGroups all;
  for (int t = 0; t < tokens; t++)
    if (slots[t] >= 0) all.tokens.push_back(t);
  std::stable_sort(all.tokens.begin(), all.tokens.end(), [&](int i, int j) { return slots[i] < slots[j]; });
  for (size_t at = 0; at < all.tokens.size(); at++) {
    int32_t slot = slots[all.tokens[at]];
    if (at && slot == all.slots.back() && at - all.starts.back() < ADAPTER_TOKENS) continue;
    all.starts.push_back(at);
    all.slots.push_back(slot);
  }
  all.starts.push_back(all.tokens.size());
  return all;
}

void adapt(const Adapters &a, const TokenGroups &all, const uint16_t *x, size_t stride, uint16_t *y, size_t y_stride) {
  int64_t work = 0;
  const std::vector<AdapterGroup> groups = changing(a, all, x, stride, y, y_stride, work);
  if (groups.empty()) return;
  const Kernels &set = kernels();
  auto num_rows = [&](const AdapterGroup &group) { return rank_of(a, group.slot) * a.parts; };
  auto num_outputs = [&](const AdapterGroup &) { return a.outputs; };
  if (work < WORTH_SHARING || pool_threads() == 1) {
    for (const AdapterGroup &group : groups) set.adapter_shrink(&a, &group, 0, num_rows(group));
    for (const AdapterGroup &group : groups) set.adapter_expand(&a, &group, 0, a.outputs);
    return;
  }
  share(groups, FEWEST_ROWS, num_rows, [&](const AdapterGroup &group, int begin, int end) {
    set.adapter_shrink(&a, &group, begin, end);
  });
  share(groups, FEWEST_OUTPUTS, num_outputs, [&](const AdapterGroup &group, int begin, int end) {
    set.adapter_expand(&a, &group, begin, end);
  });
}

}  // namespace kvasir

using namespace kvasir;

int32_t kv_adapt(const Adapters *a, const uint16_t *x, int64_t stride, const int32_t *slots, int32_t tokens, uint16_t *y,
                 int64_t y_stride) {
  for (int t = 0; t < tokens; t++)
    if (slots[t] >= a->slots) return 0;
  adapt(*a, group_tokens(slots, tokens), x, size_t(stride), y, size_t(y_stride));
  return 1;
}
