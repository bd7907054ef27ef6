#include "adapters.h"

#include <algorithm>
#include <vector>

#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int LOW_BUFFER = 5;
constexpr int64_t WORTH_SHARING = 1 << 15;  // products

}  // namespace

void adapt(const Adapters &a, const uint16_t *x, size_t stride, const int32_t *slots, int tokens, uint16_t *y,
           size_t y_stride) {
  const Kernels &set = kernels();
  int64_t work = 0;
  for (int t = 0; t < tokens; t++)
    if (slots[t] >= 0) work += int64_t(a.uses[2 * slots[t]]) * (a.inputs * a.parts + a.outputs) + a.uses[2 * slots[t] + 1];
  if (!work) return;
  // Tokens of one slot together, so that its factors are read once for several.
  std::vector<int> order;
  for (int t = 0; t < tokens; t++)
    if (slots[t] >= 0) order.push_back(t);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return slots[i] < slots[j]; });
  std::vector<size_t> starts;
  for (size_t at = 0; at < order.size(); at++) {
    bool goes_on = at && slots[order[at]] == slots[order[at - 1]] && at - starts.back() < ADAPTER_TOKENS;
    if (!goes_on) starts.push_back(at);
  }
  starts.push_back(order.size());
  auto one = [&](int group) {
    const uint16_t *from[ADAPTER_TOKENS];
    uint16_t *to[ADAPTER_TOKENS];
    size_t begin = starts[size_t(group)], count = starts[size_t(group) + 1] - begin;
    for (size_t i = 0; i < count; i++) {
      from[i] = x + size_t(order[begin + i]) * stride;
      to[i] = y + size_t(order[begin + i]) * y_stride;
    }
    auto *low = (float *)thread_buffer(LOW_BUFFER, 4 * ADAPTER_TOKENS * size_t(a.rank) + 64);
    set.adapt_rows(&a, slots[order[begin]], int32_t(count), from, to, low);
  };
  int groups = int(starts.size()) - 1;
  if (work < WORTH_SHARING) {
    for (int group = 0; group < groups; group++) one(group);
  } else {
    parallel(groups, one);
  }
}

}  // namespace kvasir

using namespace kvasir;

int32_t kv_adapt(const Adapters *a, const uint16_t *x, int64_t stride, const int32_t *slots, int32_t tokens, uint16_t *y,
                 int64_t y_stride) {
  for (int t = 0; t < tokens; t++)
    if (slots[t] >= a->slots) return 0;
  adapt(*a, x, size_t(stride), slots, tokens, y, size_t(y_stride));
  return 1;
}
