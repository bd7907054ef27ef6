// Adapters of linear layers: products of low rank, chosen by each token's slot.
#pragma once

#include "kernels.h"

namespace kvasir {

// y = y * gain + shift + (x shrink^T) expand for every token with a slot; see kvasir/kernels/layout.py.
void adapt(const Adapters &, const uint16_t *x, size_t stride, const int32_t *slots, int tokens, uint16_t *y,
           size_t y_stride);

}  // namespace kvasir
