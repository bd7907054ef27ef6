// Adapters of linear layers: products of low rank, chosen by each token's slot.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvasir {

// Tokens of one slot together, at most ADAPTER_TOKENS, so that its factors are read once for several.
struct TokenGroups {
  std::vector<int> tokens;     // those with a slot
  std::vector<size_t> starts;  // where each group begins in `tokens`, and the end
  std::vector<int32_t> slots;  // of each group
};

TokenGroups group_tokens(const int32_t *slots, int tokens);

// y = y * gain + shift + (x shrink^T) expand for every token of a group; see kvasir/kernels/layout.py.
void adapt(const Adapters &, const TokenGroups &, const uint16_t *x, size_t stride, uint16_t *y, size_t y_stride);

}  // namespace kvasir
