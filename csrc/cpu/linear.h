// Matrix products, split over the threads of the pool.
#pragma once

#include "kernels.h"

namespace kvasir {

enum After : int32_t { NOTHING = 0, ACTIVATE = 1, GATE = 2 };

// GATE: activation(first half of the outputs) * second half.
void linear(const Matrix &, const uint16_t *x, size_t stride, int rows, uint16_t *out, size_t out_stride,
            After after = NOTHING, int activation = 0);

}  // namespace kvasir
