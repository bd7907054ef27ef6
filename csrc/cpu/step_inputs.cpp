// The token ids, positions and cache slots of a step. See kernels/reference.py.
#include <algorithm>
#include <numeric>

#include "kvasir_cpu.h"

int32_t kv_step_inputs(const kv_rows *state, const int64_t *rows, const int32_t *num_tokens, const int32_t *token_ids,
                       int32_t sequences, int32_t tokens, kv_step_tokens *out) {
  const int32_t *end = num_tokens + sequences;
  if (std::any_of(num_tokens, end, [](int32_t n) { return n < 0; }) || std::accumulate(num_tokens, end, int64_t(0)) != tokens)
    return 0;
  int32_t at = out->query_start[0] = 0;
  for (int32_t i = 0; i < sequences; i++) {
    int64_t row = rows[i];
    const int32_t *table = state->tables + row * state->table_stride;
    for (int64_t position = state->num_computed[row], end = position + num_tokens[i]; position < end; position++, at++) {
      out->ids[at] = token_ids[at] >= 0 ? token_ids[at] : state->next_token[row];
      out->positions[at] = position;
      out->slots[at] = int64_t(table[position / state->block_size]) * state->block_size + position % state->block_size;
    }
    out->lengths[i] = state->num_computed[row] += num_tokens[i];
    out->query_start[i + 1] = at;
  }
  return 1;
}
