// The experts of a layer. Each multiplies the tokens routed to it; experts without tokens are not read.
#include <string.h>

#include <algorithm>
#include <vector>

#include "bfloat.h"
#include "kvasir_cpu.h"
#include "linear.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int EXPERTS_BUFFER = 6;
constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers to copy or to add

template <class F>
void each(int count, size_t width, const F &f) {
  if (int64_t(count) * int64_t(width) < WORTH_SHARING) {
    for (int i = 0; i < count; i++) f(i);
  } else {
    parallel(count, f);
  }
}

// The choices of all tokens, sorted by expert: those of expert e are starts[e] to starts[e + 1]. A choice's number is
// token * top_k + its rank; `choice` lists the numbers in sorted order, `place` is a choice's index there.
struct Order {
  std::vector<int32_t> starts, choice, place;

  explicit Order(const kv_routes &routes, int experts) {
    int count = routes.tokens * routes.top_k;
    starts.assign(size_t(experts) + 1, 0);
    choice.resize(size_t(count)), place.resize(size_t(count));
    for (int i = 0; i < count; i++) starts[size_t(routes.chosen[i]) + 1]++;
    for (size_t e = 0; e < size_t(experts); e++) starts[e + 1] += starts[e];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (int i = 0; i < count; i++) {
      int32_t at = next[size_t(routes.chosen[i])]++;
      choice[size_t(at)] = i, place[size_t(i)] = at;
    }
  }

  int rows(int expert) const { return starts[size_t(expert) + 1] - starts[size_t(expert)]; }
};

// A token's rows times their weights, summed in float32 in the router's order: the rest of the batch changes nothing.
void add_weighted(const kv_routes &routes, const Order &order, const uint16_t *made, size_t hidden, int token,
                  uint16_t *out) {
  constexpr size_t PIECE = 512;
  float sums[PIECE];
  for (size_t begin = 0; begin < hidden; begin += PIECE) {
    size_t size = std::min(PIECE, hidden - begin);
    std::fill(sums, sums + size, 0.f);
    for (int k = 0; k < routes.top_k; k++) {
      size_t number = size_t(token) * size_t(routes.top_k) + size_t(k);
      const uint16_t *row = made + size_t(order.place[number]) * hidden + begin;
      float weight = routes.weights[number];
      for (size_t i = 0; i < size; i++) sums[i] += weight * from_bfloat(row[i]);
    }
    for (size_t i = 0; i < size; i++) out[begin + i] = to_bfloat(sums[i]);
  }
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

int32_t kv_experts(const Matrix *gate_up, const Matrix *down, int32_t experts, const kv_routes *routes,
                   const uint16_t *x, int32_t activation, uint16_t *out) {
  const int64_t *chosen = routes->chosen, *end = chosen + int64_t(routes->tokens) * routes->top_k;
  if (std::any_of(chosen, end, [&](int64_t e) { return e < 0 || e >= experts; })) return 0;
  size_t hidden = size_t(down->outputs), width = size_t(down->inputs), top_k = size_t(routes->top_k);
  Order order(*routes, experts);
  int most = 0;
  for (int e = 0; e < experts; e++) most = std::max(most, order.rows(e));
  size_t all = order.choice.size() * hidden, gathered = size_t(most) * hidden, between = size_t(most) * width;
  size_t apart = activation == CLAMPED ? 2 * between : 0;
  auto *made = (uint16_t *)thread_buffer(EXPERTS_BUFFER, (all + gathered + between + apart) * 2);
  uint16_t *rows = made + all, *inner = rows + gathered, *halves = inner + between;
  const Kernels &set = kernels();
  for (int e = 0; e < experts; e++) {
    int count = order.rows(e);
    if (count == 0) continue;
    const int32_t *choice = &order.choice[size_t(order.starts[size_t(e)])];
    each(count, hidden, [&](int i) {
      memcpy(rows + size_t(i) * hidden, x + size_t(choice[i]) / top_k * hidden, 2 * hidden);
    });
    if (activation == CLAMPED) {
      linear(gate_up[e], rows, hidden, count, halves, 2 * width);
      each(count, width, [&](int i) {
        size_t row = size_t(i) * width;
        set.clamped(halves + 2 * row, inner + row, int32_t(width), routes->alpha, routes->limit);
      });
    } else {
      linear(gate_up[e], rows, hidden, count, inner, width, GATE, activation);
    }
    linear(down[e], inner, width, count, made + size_t(order.starts[size_t(e)]) * hidden, hidden);
  }
  each(routes->tokens, hidden * top_k,
       [&](int t) { add_weighted(*routes, order, made, hidden, t, out + size_t(t) * hidden); });
  return 1;
}
