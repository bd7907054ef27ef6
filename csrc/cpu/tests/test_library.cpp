// The library by itself, for the sanitizers: every operation on every instruction set this machine has, with several
// threads, and from several threads at once. Results are compared with plain loops.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../kvasir_cpu.h"
#include "../pool.h"

using namespace kvasir;

namespace {

int failures = 0;
std::string where;

void check(bool fine, const char *what) {
  if (!fine) {
    printf("FAILED on %s: %s\n", where.c_str(), what);
    failures++;
  }
}

uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float y;
  memcpy(&y, &u, 4);
  return y;
}

std::vector<uint16_t> random_numbers(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> numbers(count);
  for (auto &x : numbers) x = to_bf16(normal(generator));
  return numbers;
}

size_t bytes_of(Kind kind, size_t numbers) {
  return kind == BF16 ? numbers * 2 : kind == Q8 ? numbers : kind == Q6 ? numbers / 4 * 3 : numbers / 2;
}

// A matrix with its memory, exactly as large as it must be, so that a step too far is seen.
struct Packed {
  Matrix m{};
  std::vector<uint8_t> data;
  std::vector<uint16_t> scale, min;

  Packed(Kind kind, int outputs, int inputs, const std::vector<uint16_t> &source) {
    m.kind = kind, m.outputs = outputs, m.inputs = inputs, m.padded_inputs = (inputs + 31) / 32 * 32;
    m.group = 32, m.offset = kind == Q8 ? 128 : kind == Q6 ? 32 : 0;
    size_t numbers = size_t((outputs + 15) / 16 * 16) * size_t(m.padded_inputs);
    data.resize(bytes_of(kind, numbers));
    scale.resize(kind == BF16 ? 0 : numbers / 32);
    min.resize(kind == Q4 ? numbers / 32 : 0);
    m.data = data.data(), m.scale = scale.data(), m.min = kind == Q4 ? min.data() : nullptr;
    kv_pack(&m, source.data(), 1, inputs, 0, outputs);
  }

  std::vector<uint16_t> rows() const {
    std::vector<int64_t> all(size_t(m.outputs));
    for (size_t i = 0; i < all.size(); i++) all[i] = int64_t(i);
    std::vector<uint16_t> out(size_t(m.outputs) * size_t(m.inputs));
    check(kv_expand_rows(&m, all.data(), m.outputs, out.data()), "they are the matrix's rows");
    return out;
  }
};

void test_products() {
  for (Kind kind : {BF16, Q8, Q6, Q4})
    for (int inputs : {64, 50}) {
      const int outputs = 75;
      Packed packed(kind, outputs, inputs, random_numbers(size_t(outputs * inputs), 1));
      std::vector<uint16_t> weights = packed.rows();
      for (int rows : {1, 3, 16, 29, 40}) {
        std::vector<uint16_t> x = random_numbers(size_t(rows * inputs), 2), out(size_t(rows * outputs));
        kv_linear(&packed.m, x.data(), inputs, rows, -1, out.data());
        double error = 0, size = 0;
        for (int i = 0; i < rows; i++)
          for (int n = 0; n < outputs; n++) {
            double wanted = 0;
            for (int k = 0; k < inputs; k++)
              wanted += double(from_bf16(x[size_t(i * inputs + k)])) * double(from_bf16(weights[size_t(n * inputs + k)]));
            error += pow(wanted - double(from_bf16(out[size_t(i * outputs + n)])), 2);
            size += wanted * wanted;
          }
        check(sqrt(error / size) < 0.015, "a product is near");
      }
    }
}

// The types of GGUF files: their numbers there, bytes for so many numbers, and what holds them.
struct FileType {
  int32_t number, bytes, numbers;
  Kind kind;
  int32_t group, offset;
  bool has_min;
};

constexpr FileType FILE_TYPES[] = {
    {2, 18, 32, Q4, 32, 8, false},  {3, 20, 32, Q4, 32, 0, true},    {6, 22, 32, Q6, 32, 16, false},
    {7, 24, 32, Q6, 32, 0, true},   {8, 34, 32, Q8, 32, 128, false}, {10, 84, 256, Q4, 16, 0, true},
    {11, 110, 256, Q4, 16, 4, false}, {12, 144, 256, Q4, 32, 0, true}, {13, 176, 256, Q6, 32, 0, true},
    {14, 210, 256, Q6, 16, 32, false},
};

void test_file_types() {
  const int outputs = 35, inputs = 512;
  std::mt19937 generator(11);
  for (const FileType &type : FILE_TYPES) {
    size_t row = size_t(inputs / type.numbers * type.bytes), numbers = size_t((outputs + 15) / 16 * 16) * inputs;
    std::vector<uint8_t> source(row * outputs), data(bytes_of(type.kind, numbers));
    for (auto &byte : source) byte = uint8_t(generator() & 0x3f);  // scales that are no infinities
    std::vector<uint16_t> scale(numbers / size_t(type.group)), min(type.has_min ? scale.size() : 0);
    Matrix m{type.kind, outputs, inputs, inputs, type.group, type.offset, data.data(), scale.data(),
             type.has_min ? min.data() : nullptr, nullptr};
    check(kv_pack_gguf(&m, source.data(), type.number, int64_t(row), 0, outputs) == 1, "a file's type is known");
    std::vector<uint16_t> x = random_numbers(3 * inputs, 12), out(3 * outputs), one(inputs);
    kv_linear(&m, x.data(), inputs, 3, -1, out.data());
    int64_t last = outputs - 1;
    kv_expand_rows(&m, &last, 1, one.data());
    double wanted = 0, size = 1e-6;
    for (int k = 0; k < inputs; k++) {
      double part = double(from_bf16(x[size_t(k)])) * double(from_bf16(one[size_t(k)]));
      wanted += part, size += part * part;
    }
    check(fabs(wanted - double(from_bf16(out[outputs - 1]))) < 0.3 * sqrt(size), "a product of a file's numbers is near");
  }
  Matrix none{};
  check(kv_pack_gguf(&none, nullptr, 99, 0, 0, 0) == 0, "other types are not");
}

void test_rows() {
  const int rows = 9, inputs = 50, inner = 48;
  std::vector<uint16_t> x = random_numbers(rows * inputs, 13), gain(inputs, to_bf16(1)), residual(rows * inputs, 0);
  std::vector<uint16_t> normed(rows * inputs), added(rows * inputs);
  for (int kind : {1, 3}) {
    Norm norm{kind, 1e-6f, gain.data(), nullptr};
    std::fill(residual.begin(), residual.end(), uint16_t(0));
    kv_norm(&norm, x.data(), rows, inputs, normed.data());
    kv_add_norm(&norm, x.data(), residual.data(), rows, inputs, added.data());
    check(normed == added && residual == x, "nothing plus a row is the row");
  }
  Packed up(BF16, 2 * inner, inputs, random_numbers(2 * inner * inputs, 14));
  std::vector<uint16_t> halves(rows * 2 * inner), apart(rows * inner), fused(rows * inner);
  kv_linear(&up.m, x.data(), inputs, rows, -1, halves.data());
  kv_gated(halves.data(), rows, inner, SILU, apart.data());
  kv_gated_linear(&up.m, x.data(), inputs, rows, SILU, fused.data());
  double error = 0, size = 0;
  for (size_t i = 0; i < fused.size(); i++) {
    error += pow(double(from_bf16(fused[i]) - from_bf16(apart[i])), 2);
    size += pow(double(from_bf16(apart[i])), 2);
  }
  check(sqrt(error / size) < 0.01, "in one go as one after the other");
}

void test_experts() {
  const int hidden = 64, tokens = 3;
  int64_t chosen[] = {2, 0, 0, 2, 2, 0};  // nobody chooses the second
  float weights[] = {0.75f, 0.25f, 0.5f, 0.5f, 1, 0};
  kv_routes routes{tokens, 2, chosen, weights};
  for (int inner : {48, 24}) {
    std::vector<Packed> up, down;
    for (unsigned e = 0; e < 3; e++) {
      up.emplace_back(Q8, 2 * inner, hidden, random_numbers(size_t(2 * inner * hidden), 20 + e));
      down.emplace_back(Q4, hidden, inner, random_numbers(size_t(hidden * inner), 30 + e));
    }
    Matrix ups[] = {up[0].m, up[1].m, up[2].m}, downs[] = {down[0].m, down[1].m, down[2].m};
    std::vector<uint16_t> x = random_numbers(tokens * hidden, 40), out(tokens * hidden), between(tokens * size_t(inner));
    std::vector<uint16_t> made[3];
    for (int e : {0, 2}) {
      made[e].resize(x.size());
      kv_gated_linear(&ups[e], x.data(), hidden, tokens, SILU, between.data());
      kv_linear(&downs[e], between.data(), inner, tokens, -1, made[e].data());
    }
    check(kv_experts(ups, downs, 2, &routes, x.data(), SILU, out.data()) == 0, "an expert that is not there is noticed");
    check(kv_experts(ups, downs, 3, &routes, x.data(), SILU, out.data()) == 1, "all are there");
    double error = 0, size = 0;
    for (size_t i = 0; i < out.size(); i++) {
      size_t first = i / hidden * 2, second = first + 1;
      double wanted = double(weights[first]) * double(from_bf16(made[chosen[first]][i])) +
                      double(weights[second]) * double(from_bf16(made[chosen[second]][i]));
      error += pow(wanted - double(from_bf16(out[i])), 2), size += wanted * wanted;
    }
    check(sqrt(error / size) < 0.005, "experts do the tokens that chose them");
  }
}

// A decoder of two layers on random weights; `tokens` of one text.
struct Tiny {
  static constexpr int HIDDEN = 64, HEADS = 4, KV_HEADS = 2, DIM = 16, INNER = 96, VOCABULARY = 50, BLOCK = 4, LENGTH = 1200;
  Packed qkv{BF16, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, random_numbers(128 * HIDDEN, 3)};
  Packed o{BF16, HIDDEN, HEADS * DIM, random_numbers(HIDDEN * 64, 4)};
  Packed up{Q8, 2 * INNER, HIDDEN, random_numbers(2 * INNER * HIDDEN, 5)};
  Packed down{Q4, HIDDEN, INNER, random_numbers(HIDDEN * INNER, 6)};
  Packed embedding{BF16, VOCABULARY, HIDDEN, random_numbers(VOCABULARY * HIDDEN, 7)};
  std::vector<uint16_t> gain = std::vector<uint16_t>(HIDDEN, to_bf16(1));
  std::vector<uint8_t> caches[2];
  std::vector<float> angles = std::vector<float>(LENGTH * DIM, 0.5f);
  std::vector<int32_t> table;
  kv_layer layers[2] = {};
  kv_decoder decoder{};

  explicit Tiny(bool is_int8 = false) {
    const int vector = is_int8 ? DIM + 4 : DIM, token = KV_HEADS * vector;  // in numbers of the cache's type
    for (int b = 0; b < LENGTH / BLOCK; b++) table.push_back(LENGTH / BLOCK - 1 - b);
    Norm norm{1, 1e-6f, gain.data(), nullptr};
    for (int i = 0; i < 2; i++) {
      caches[i].resize(size_t(LENGTH) * 2 * size_t(token) * (is_int8 ? 1 : 2));
      kv_layer &layer = layers[i];
      layer.attention_norm = layer.mlp_norm = norm;
      layer.qkv = qkv.m, layer.o = o.m, layer.up = up.m, layer.down = down.m;
      layer.rotation = {angles.data(), DIM, 0};
      layer.cache = {caches[i].data(), 2 * BLOCK * token, BLOCK * token, token, vector, BLOCK, is_int8};
      layer.heads = HEADS, layer.kv_heads = KV_HEADS, layer.head_dim = DIM;
      layer.gated = 1, layer.scale = 0.25f, layer.residual_scale = 1;
      if (i == 1) layer.window = 700, layer.softcap = 20;
    }
    decoder.hidden = HIDDEN, decoder.num_layers = 2, decoder.layers = layers, decoder.embedding = embedding.m;
    decoder.embedding_scale = 1, decoder.final_norm = norm;
  }

  // Tokens begin .. end of the text, the ones before being in the cache.
  std::vector<uint16_t> run(int begin, int end, int only_last = 0) {
    std::vector<int64_t> ids, positions, slots;
    for (int t = begin; t < end; t++) {
      ids.push_back(t * 7 % VOCABULARY);
      positions.push_back(t);
      slots.push_back(int64_t(table[size_t(t / BLOCK)]) * BLOCK + t % BLOCK);
    }
    int64_t row = 0;
    int32_t starts[2] = {0, end - begin}, length = end;
    kv_group group{slots.data(), table.data(), int64_t(table.size())};
    kv_step step{end - begin, 1, 1, 1, only_last, ids.data(), positions.data(), &row, starts, &length, &group};
    std::vector<uint16_t> out(size_t(only_last ? 1 : end - begin) * HIDDEN);
    kv_forward(&decoder, &step, out.data());
    return out;
  }
};

void test_decoder(bool is_int8) {
  Tiny whole(is_int8), pieces(is_int8);
  std::vector<uint16_t> all = whole.run(0, 1100);
  pieces.run(0, 700, 1);
  pieces.run(700, 1099);
  std::vector<uint16_t> last = pieces.run(1099, 1100);  // one token over many keys: they are shared out
  check(std::equal(last.begin(), last.end(), all.end() - Tiny::HIDDEN), "a text in pieces is the text at once, bit by bit");
}

void test_sampling() {
  const int lines = 6, vocabulary = 3001;
  std::vector<uint16_t> logits = random_numbers(size_t(lines * vocabulary), 8);
  logits[2 * vocabulary + 123] = to_bf16(50);
  std::vector<int64_t> rows = {5, 3, 1, 0, 2, 4};
  std::vector<float> temperature(lines, 0.8f), min_p(lines, 0.01f), top_p(lines, 0.9f), floor(lines);
  std::vector<int32_t> top_k(lines, 40), seeds(lines, 5), positions = {0, 1, 2, 3, 4, 5}, tokens(lines), next(lines);
  kv_sampling sampling{rows.data(),  temperature.data(), min_p.data(), top_p.data(),
                       top_k.data(), seeds.data(),       next.data()};
  kv_logit_floor(logits.data(), 0, lines, vocabulary, &sampling, floor.data());
  kv_draw(logits.data(), 0, lines, vocabulary, &sampling, positions.data(), tokens.data());
  check(tokens[2] == 123, "what is nearly certain is drawn");
  for (size_t i = 0; i < lines; i++) check(next[size_t(rows[i])] == tokens[i], "a row's next token is the one drawn");
  for (int i = 0; i < lines; i++) {
    int kept = 0;
    for (int v = 0; v < vocabulary; v++) kept += from_bf16(logits[size_t(i * vocabulary + v)]) >= floor[size_t(i)];
    check(kept >= 1 && kept <= 45, "top-k keeps about k");
  }
}

void test_step_inputs() {
  std::vector<int32_t> num_computed = {3, 17, 0}, next = {70, 71, 72}, tables = {4, 5, 9, 8, 2, 1};
  kv_rows state{num_computed.data(), next.data(), tables.data(), 2, 16};
  std::vector<int64_t> rows = {1, 2}, ids(4), positions(4), slots(4);
  std::vector<int32_t> num_tokens = {1, 3}, token_ids = {-1, 6, 7, 8}, query_start(3), lengths(2);
  kv_step_tokens out{ids.data(), positions.data(), slots.data(), query_start.data(), lengths.data()};
  for (int wrong : {3, 5})
    check(!kv_step_inputs(&state, rows.data(), num_tokens.data(), token_ids.data(), 2, wrong, &out), "others are refused");
  check(num_computed == std::vector<int32_t>{3, 17, 0}, "and change nothing");
  check(kv_step_inputs(&state, rows.data(), num_tokens.data(), token_ids.data(), 2, 4, &out), "as many tokens as ids");
  check(ids == std::vector<int64_t>{71, 6, 7, 8} && positions == std::vector<int64_t>{17, 0, 1, 2}, "tokens are found");
  check(slots == std::vector<int64_t>{8 * 16 + 1, 32, 33, 34}, "and their places");
  check(lengths == std::vector<int32_t>{18, 3} && num_computed == std::vector<int32_t>{3, 18, 3}, "and counted");
  check(query_start == std::vector<int32_t>{0, 1, 4}, "and told apart");
}

void test_pool() {
  for (int threads : {1, 2, 4}) {
    configure_pool(threads, nullptr);
    std::vector<std::thread> callers;
    std::atomic<int64_t> total{0};
    for (int c = 0; c < 3; c++)
      callers.emplace_back([&] {
        for (int round = 0; round < 50; round++) {
          std::vector<int> seen(37, 0);
          parallel(37, [&](int task) { seen[size_t(task)]++; });
          for (int count : seen) total += count == 1;
        }
      });
    for (auto &caller : callers) caller.join();
    check(total == 3 * 50 * 37, "every task runs once");
  }
}

void test_a_pool_that_is_replaced_at_work() {
  std::atomic<bool> done{false};
  std::vector<std::thread> callers;
  for (int c = 0; c < 2; c++)
    callers.emplace_back([&] {
      while (!done) {
        std::atomic<int> total{0};
        parallel(37, [&](int) { total++; });
        check(total == 37, "every task runs once, on whichever threads");
      }
    });
  for (int round = 0; round < 60; round++) check(configure_pool(1 + round % 4, nullptr) == 1 + round % 4, "all are granted");
  done = true;
  for (auto &caller : callers) caller.join();
}

}  // namespace

int main() {
  where = "any instruction set";
  test_pool();
  test_a_pool_that_is_replaced_at_work();
  test_step_inputs();
  configure_pool(3, nullptr);
  std::istringstream sets(kv_instruction_sets());
  for (std::string set; sets >> set;) {
    where = set;
    kv_use_instruction_set(set.c_str());
    test_products();
    test_file_types();
    test_rows();
    test_experts();
    test_decoder(false);
    test_decoder(true);
    test_sampling();
  }
  configure_pool(1, nullptr);
  printf(failures ? "%d failures\n" : "all fine\n", failures);
  return failures ? 1 : 0;
}
