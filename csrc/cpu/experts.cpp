// The experts of a layer: each multiplies the rows that were sent to it, and those that got none are not read.
#include "kvasir_cpu.h"
#include "linear.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int INNER_BUFFER = 6;

}  // namespace
}  // namespace kvasir

using namespace kvasir;

void kv_experts(const Matrix *gate_up, const Matrix *down, int32_t experts, const int32_t *starts, const uint16_t *x,
                int32_t activation, uint16_t *out) {
  for (int e = 0; e < experts; e++) {
    size_t begin = size_t(starts[e]), hidden = size_t(down[e].outputs), width = size_t(down[e].inputs);
    int rows = starts[e + 1] - starts[e];
    if (rows == 0) continue;
    auto *inner = (uint16_t *)thread_buffer(INNER_BUFFER, size_t(rows) * width * 2);
    linear(gate_up[e], x + begin * hidden, hidden, rows, inner, width, GATE, activation);
    linear(down[e], inner, width, rows, out + begin * hidden, hidden);
  }
}
