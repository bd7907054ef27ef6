// Top-k, top-p and min-p without sorting, and the draw. One line of logits is one task. See kernels/reference.py.
#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>

#include "kvasir_cpu.h"
#include "machine.h"
#include "pool.h"

namespace kvasir {
namespace {

constexpr int BAND_BUFFER = 5;
constexpr int32_t BAND_ROOM = 1024;
constexpr float FIRST_DEPTH = -2;
constexpr int32_t NOT_A_TOKEN = -1;  // reference.NOT_A_TOKEN
constexpr double ROUNDING = 1e-5;  // bound of the rounding error of a sum of floats

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

Noise noise_of(uint32_t seed, uint32_t position) {
  uint32_t flip = mix(mix(seed) + position * 0x9e3779b1u);
  return {0x85ebca77u, flip, mix(flip ^ 0x5bd1e995u)};
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
};

// Finds the end of a walk from the largest logit down without sorting all logits: it counts and weighs the logits down to
// some depth until the end lies among a few, and sorts only those. A depth is a logit's difference from the best one,
// divided by the temperature.
class Walk {
 public:
  // `all` are the logits that may be kept.
  Walk(const Line &line, float best, float scale, const Reach &all) : line_(line), best_(best), scale_(scale), all_(all) {
    band_ = (float *)thread_buffer(BAND_BUFFER, sizeof(float) * BAND_ROOM);
  }

  // The last value that fewer than `most` logits, of less weight than `mass`, precede. `inside` is the weight of all up to
  // it, at most `most` logits. A later walk may only end earlier.
  float find(int64_t most, double mass, double *inside) {
    if (!size_ || above_.mass >= mass) narrow(most, mass);
    int64_t before = above_.count, equal = 0;
    double passed = above_.mass, here = 0;
    float value = 0;
    for (int64_t at = 0, next; at < size_; at = next) {
      if (at && (before + equal >= most || passed + here >= mass)) break;
      before += equal;
      passed += here;
      value = band_[at];
      for (next = at + 1; next < size_ && band_[next] == value;) next++;
      equal = (next - at) * copies_;
      here = double(expf(depth_of(value))) * double(equal);
    }
    *inside = passed + here / double(equal) * double(std::min(most - before, equal));
    return value;
  }

 private:
  float depth_of(float logit) const { return (logit - best_) * scale_; }

  Reach look(float depth, float below) {
    return kernels().reach(line_.data, line_.is_float, line_.size, best_, scale_, depth, below, band_, BAND_ROOM);
  }

  void narrow(int64_t most, double mass) {
    float near = FLT_MIN, far = depth_of(all_.lowest);  // the walk ends between the two
    float depth = std::max(FIRST_DEPTH, far);
    above_ = {0, 0, 0};
    copies_ = 1;
    do {
      Reach found = look(depth, near);
      int64_t count = above_.count + found.count;
      double weight = above_.mass + found.mass;
      if (depth > far && count < most && weight < mass * (1 + ROUNDING)) {
        near = depth;
        above_ = {count, weight, found.lowest};
      } else {
        size_ = found.count;
        if (size_ <= BAND_ROOM) return std::sort(band_, band_ + size_, std::greater<float>());
        far = depth_of(found.lowest);
      }
      depth = (near + far) / 2;
      if (near < 0) depth = std::max(depth, 2 * near);  // few logits are near the best, so the depth grows slowly
    } while (far < depth && depth < near);
    copies_ = look(far, near).count;  // more equal logits than the buffer holds
    size_ = 1;
  }

  Line line_;
  float best_, scale_;
  Reach all_, above_{0, 0, 0};
  float *band_;
  int64_t size_ = 0, copies_ = 1;  // size of the band, and how often each of its logits occurs
};

float floor_of(const Line &line, float heat, float min_p, int32_t top_k, float top_p) {
  if (!(heat > 0) || !(min_p > 0 || top_k > 0 || top_p < 1)) return -INFINITY;
  const Kernels &set = kernels();
  float best = line[set.best(line.data, line.is_float, line.size)], scale = 1.f / heat;
  float least = min_p > 0 ? logf(min_p) : -FLT_MAX;
  Reach all = set.reach(line.data, line.is_float, line.size, best, scale, least, INFINITY, nullptr, 0);
  if (!all.count) return -INFINITY;  // all are NaN
  Walk walk(line, best, scale, all);
  int64_t most = top_k > 0 ? top_k : all.count;
  double inside = all.mass, unused;
  float floor = all.count <= most ? all.lowest : walk.find(most, INFINITY, &inside);
  return top_p >= 1 ? floor : std::max(floor, walk.find(most, double(top_p) * inside, &unused));
}

// Whether a logit is not a number. The loops have no exit, so that the compiler can vectorize them.
bool has_nan(const Line &line) {
  uint32_t found = 0;
  if (line.is_float) {
    const uint32_t *bits = (const uint32_t *)line.data;
    for (int i = 0; i < line.size; i++) found |= uint32_t((bits[i] & 0x7fffffffu) > 0x7f800000u);
  } else {
    const uint16_t *bits = (const uint16_t *)line.data;
    for (int i = 0; i < line.size; i++) found |= uint32_t((bits[i] & 0x7fffu) > 0x7f80u);
  }
  return found != 0;
}

int32_t draw_from(const Line &line, float heat, uint32_t seed, uint32_t position) {
  const Kernels &set = kernels();
  if (!(heat > 0)) return set.best(line.data, line.is_float, line.size);
  return set.drawn(line.data, line.is_float, line.size, heat, noise_of(seed, position));
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
    int32_t token = draw_from(line, s->temperature[row], uint32_t(s->seeds[row]), uint32_t(positions[i]));
    s->next_token[row] = std::min(std::max(token, 0), vocabulary - 1);
    tokens[i] = has_nan(line) ? NOT_A_TOKEN : token;
  });
}
