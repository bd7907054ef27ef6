// Top-k, top-p and min-p without sorting, and the draw. One line of logits is one task. See kernels/reference.py.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>

#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int COUNTS_BUFFER = 5, NEAR_BUFFER = 6;
constexpr int32_t MOST_NEAR = 4096, MOST_LOOKS = 12;
constexpr float FIRST_DEPTH = -2, LAST_DEPTH = -64;

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

double uniform(uint32_t seed, uint32_t position) {
  uint32_t high = mix(mix(seed) + position * 0x9e3779b1u), low = mix(high ^ 0x5bd1e995u);
  return (double(high) * 0x1p21 + double(low >> 11)) * 0x1p-53;
}

// A line of logits of either type.
struct Line {
  const void *data;
  int32_t is_float, size;

  float operator[](int i) const {
    if (is_float) return ((const float *)data)[i];
    uint32_t u = uint32_t(((const uint16_t *)data)[i]) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
  const void *at(int i) const { return (const char *)data + size_t(i) * (is_float ? 4 : 2); }
};

// Numbers in the order of the floats.
uint32_t to_key(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

float from_key(uint32_t key) {
  uint32_t u = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

struct Bucket {
  double mass;
  int64_t count;
};

// Walks the logits from the largest down without sorting them: the upper halves of their keys are counted, then the lower
// halves of those in the bucket where the walk ends. A bfloat16 has no lower half.
class Walk {
 public:
  // Logits below `least`, as differences from the best by the heat, are left out.
  Walk(const Line &line, float best, float scale, float least) : line_(line), best_(best), scale_(scale), least_(least) {
    buckets_ = (Bucket *)thread_buffer(COUNTS_BUFFER, sizeof(Bucket) << 16);
  }

  // The last value before which fewer than `most` logits stand, and less than `mass`. `inside` is what all up to it
  // weigh, of which there are at most `most`.
  float find(int64_t most, double mass, double *inside) {
    before_ = {0, 0};
    count(0, false);
    uint32_t high = descend(most, mass), low = lower_half(high);
    if (line_.is_float) {
      count(high, true);
      low = descend(most, mass);
    }
    float value = from_key(high << 16 | low);
    *inside = before_.mass + weight(value) * double(std::min(most - before_.count, last_.count));
    return value;
  }

 private:
  static uint32_t lower_half(uint32_t high) { return high & 0x8000u ? 0 : 0xffff; }  // of a bfloat16's key
  double weight(float x) const { return double(expf((x - best_) * scale_)); }

  void count(uint32_t high, bool lower) {
    std::fill(buckets_, buckets_ + (1 << 16), Bucket{0, 0});
    for (int i = 0; i < line_.size; i++) {
      float x = line_[i];
      if (!((x - best_) * scale_ >= least_)) continue;
      uint32_t key = to_key(x);
      if (lower && key >> 16 != high) continue;
      Bucket &bucket = buckets_[lower ? key & 0xffff : key >> 16];
      bucket.count++;
      if (line_.is_float) bucket.mass += weight(x);
    }
    for (uint32_t b = 0; b < 1 << 16 && !line_.is_float; b++)
      if (buckets_[b].count) buckets_[b].mass = double(buckets_[b].count) * weight(from_key(b << 16 | lower_half(b)));
  }

  // The bucket in which the walk ends; `before_` is then what stands above it, `last_` what it holds.
  uint32_t descend(int64_t most, double mass) {
    Bucket passed = before_;
    uint32_t end = 0;
    last_ = {0, 0};
    for (uint32_t b = 1 << 16; b-- > 0;) {
      if (!buckets_[b].count) continue;
      if (last_.count && (passed.count >= most || passed.mass >= mass)) break;
      before_ = passed;
      last_ = buckets_[end = b];
      passed = {passed.mass + last_.mass, passed.count + last_.count};
    }
    return end;
  }

  Line line_;
  float best_, scale_, least_;
  Bucket *buckets_;
  Bucket before_{0, 0}, last_{0, 0};
};

// The same walk over the few logits that it can end at, sorted.
class ShortWalk {
 public:
  ShortWalk(float *sorted, int64_t size, float best, float scale)
      : sorted_(sorted), size_(size), best_(best), scale_(scale) {}

  float find(int64_t most, double mass, double *inside) const {
    Bucket before{0, 0}, last{0, 0};
    for (int64_t at = 0; at < size_; at += last.count) {
      Bucket passed{before.mass + last.mass, before.count + last.count};
      if (last.count && (passed.count >= most || passed.mass >= mass)) break;
      before = passed;
      int64_t end = at + 1;
      while (end < size_ && sorted_[end] == sorted_[at]) end++;
      last = {double(expf((sorted_[at] - best_) * scale_)) * double(end - at), end - at};
    }
    float value = sorted_[before.count];
    *inside = before.mass + last.mass / double(last.count) * double(std::min(most - before.count, last.count));
    return value;
  }

 private:
  const float *sorted_;
  int64_t size_;
  float best_, scale_;
};

float floor_of(const Line &line, float heat, float min_p, int32_t top_k, float top_p) {
  if (!(heat > 0) || !(min_p > 0 || top_k > 0 || top_p < 1)) return -INFINITY;
  const Kernels &set = kernels();
  float best = line[set.best(line.data, line.is_float, line.size)], scale = 1.f / heat;
  float least = min_p > 0 ? logf(min_p) : -INFINITY;
  auto reach = [&](float depth, float *out, int32_t room) {
    return set.reach(line.data, line.is_float, line.size, best, scale, depth, out, room);
  };
  int64_t most = top_k > 0 ? top_k : line.size;
  Reach all = reach(least, nullptr, 0);
  if (!all.count) return -INFINITY;  // no number among them
  if (all.count <= most && top_p >= 1) return all.lowest;
  // Nearly always the end lies among few logits: look how far below the best one must go to have it among them.
  auto *near = (float *)thread_buffer(NEAR_BUFFER, sizeof(float) * MOST_NEAR);
  double inside = all.mass, unused;
  float too_near = 0, too_far = least, depth = std::max(FIRST_DEPTH, least);
  for (int look = 0; look < MOST_LOOKS; look++) {
    Reach found = reach(depth, near, MOST_NEAR);
    bool enough = found.count >= most || depth == least;
    if (all.count <= most) enough = enough || found.mass >= double(top_p) * all.mass * (1 + 1e-5);
    if (enough && found.count <= MOST_NEAR) {
      std::sort(near, near + found.count, std::greater<float>());
      ShortWalk walk(near, found.count, best, scale);
      float floor = all.count <= most ? all.lowest : walk.find(most, INFINITY, &inside);
      return top_p >= 1 ? floor : std::max(floor, walk.find(most, double(top_p) * inside, &unused));
    }
    if (!enough && found.count > MOST_NEAR) break;
    (enough ? too_far : too_near) = depth;
    depth = too_far < LAST_DEPTH ? 2 * depth : (too_near + too_far) / 2;
    if (depth < LAST_DEPTH) depth = least;
  }
  Walk walk(line, best, scale, least);
  float floor = walk.find(most, INFINITY, &inside);
  if (top_p >= 1) return floor;
  return std::max(floor, walk.find(most, double(top_p) * inside, &unused));
}

int32_t draw_from(const Line &line, float heat, uint32_t seed, uint32_t position) {
  const Kernels &set = kernels();
  int32_t best = set.best(line.data, line.is_float, line.size);
  if (!(heat > 0)) return best;
  constexpr int PIECE = 4096;
  float most = line[best], scale = 1.f / heat;
  double goal = uniform(seed, position) * set.mass(line.data, line.is_float, line.size, most, scale), sum = 0;
  for (int at = 0; at < line.size; at += PIECE) {
    int here = std::min(PIECE, line.size - at);
    double piece = set.mass(line.at(at), line.is_float, here, most, scale);
    if (sum + piece <= goal) {
      sum += piece;
      continue;
    }
    for (int i = at; i < at + here; i++) {
      sum += double(expf((line[i] - most) * scale));
      if (sum > goal) return i;
    }
  }
  return best;  // rounding may put the goal at the very end, past every token
}

}  // namespace
}  // namespace kvasir

using namespace kvasir;

void kv_logit_floor(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *s,
                    float *floor) {
  parallel(lines, [&](int i) {
    Line line{(const char *)logits + size_t(i) * size_t(vocabulary) * (is_float ? 4 : 2), is_float, vocabulary};
    int64_t row = s->rows[i];
    floor[i] = floor_of(line, s->temperature[row], s->min_p[row], s->top_k[row], s->top_p[row]);
  });
}

void kv_draw(const void *logits, int32_t is_float, int32_t lines, int32_t vocabulary, const kv_sampling *s,
             const int32_t *positions, int32_t *tokens) {
  parallel(lines, [&](int i) {
    Line line{(const char *)logits + size_t(i) * size_t(vocabulary) * (is_float ? 4 : 2), is_float, vocabulary};
    int64_t row = s->rows[i];
    tokens[i] = draw_from(line, s->temperature[row], uint32_t(s->seeds[row]), uint32_t(positions[i]));
  });
}
