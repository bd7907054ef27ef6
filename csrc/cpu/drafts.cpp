// Drafts from a request's own text, and their verification. See kernels/reference.py.
#include <algorithm>

#include "kvasir_cpu.h"

namespace {

struct Match {
  int32_t length, end;  // tokens that match, and the place of the last of them
};

// The longest earlier occurrence of the text's last tokens, of those of equal length the first, or the last.
Match find(const int32_t *text, int32_t size, int32_t longest, bool latest) {
  Match best{0, -1};
  const int32_t last = text[size - 1];
  for (int32_t end = 0; end < size - 1; end++) {
    if (text[end] != last) continue;
    int32_t length = 1, most = std::min(longest, end + 1);
    while (length < most && text[end - length] == text[size - 1 - length]) length++;
    if (length > best.length || (latest && length == best.length)) best = {length, end};
  }
  return best;
}

}  // namespace

void kv_lookup_drafts(const int32_t *history, int64_t stride, const int64_t *rows, const int32_t *lengths, int32_t count,
                      const kv_lookup *how, int32_t *drafts, int32_t *counts) {
  for (int32_t i = 0; i < count; i++) {
    const int32_t *text = history + rows[i] * stride;
    int32_t size = lengths[i];
    Match match = find(text, size, how->longest, how->latest);
    bool found = match.length >= how->shortest;
    int32_t start = found ? match.end + 1 : 0, period = std::max(size - start, 1);
    for (int32_t j = 0; j < how->drafts; j++) drafts[rows[i] * how->drafts + j] = text[start + j % period];
    counts[rows[i]] = !found ? 0 : how->latest ? how->drafts : std::min(how->drafts, period);
  }
}

void kv_accept_drafts(const int32_t *tokens, const int64_t *rows, const int32_t *starts, const int32_t *lines,
                      int32_t count, int32_t size, const kv_draft_rows *state, int32_t *own, int32_t *taken) {
  for (int32_t i = 0; i < count; i++) {
    int64_t row = rows[i];
    const int32_t *drawn = tokens + starts[i], *draft = state->drafts + row * size;
    int32_t last = lines[i] - 1, verified = std::min(last, state->counts[row]), right = 0;
    while (right < verified && drawn[right] == draft[right]) right++;
    for (int32_t j = 0; j <= size; j++) own[int64_t(i) * (size + 1) + j] = drawn[std::min(j, last)];
    taken[i] = right + 1;
    state->next_token[row] = std::max(drawn[right], 0);
    state->num_computed[row] -= last - right;
  }
}
