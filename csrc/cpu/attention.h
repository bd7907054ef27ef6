// Attention of a step, split into tasks by sequence, key head, queries and, where these are few, keys.
#pragma once

#include "kvasir_cpu.h"

namespace kvasir {

void attention(const kv_layer &, const kv_step &, const uint16_t *query, size_t stride, uint16_t *out);

}  // namespace kvasir
