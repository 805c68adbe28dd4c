// A program of its own that runs the executor without Python, for the sanitizers (`make sanitize`): random weights and
// shapes, rows cut into chunks, beside each other and in shuffled blocks, one thread and several. It checks that every
// result is the same bits, and that float32 agrees with a naive computation in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "executor.h"
#include "machine.h"

using namespace noria;

namespace {

struct Shape {
  int hidden, intermediate, heads, kv_heads, head_dim, vocabulary, layers;
  int qkv() const { return (heads + 2 * kv_heads) * head_dim; }
  int q() const { return heads * head_dim; }
};

using Vector = std::vector<float>;

struct Weights {
  Vector embedding, frequencies, last_norm;
  struct Layer {
    Vector norm1, qkv, bias, output, norm2, gate_up, down;
  };
  std::vector<Layer> layers;
};

Vector random_vector(size_t size, float mean, float spread, std::mt19937& random) {
  std::normal_distribution<float> normal(mean, spread);
  Vector values(size);
  for (float& value : values) value = normal(random);
  return values;
}

Weights random_weights(const Shape& s, std::mt19937& random) {
  Weights w;
  w.embedding = random_vector(size_t(s.vocabulary) * s.hidden, 0, 1, random);
  w.last_norm = random_vector(s.hidden, 1, 0.2f, random);
  for (int i = 0; i < s.head_dim / 2; ++i) w.frequencies.push_back(std::pow(10000.0f, -2.0f * i / s.head_dim));
  for (int layer = 0; layer < s.layers; ++layer) {
    w.layers.push_back({random_vector(s.hidden, 1, 0.2f, random),
                        random_vector(size_t(s.qkv()) * s.hidden, 0, 0.1f, random),
                        random_vector(s.qkv(), 0, 0.1f, random),
                        random_vector(size_t(s.hidden) * s.q(), 0, 0.1f, random),
                        random_vector(s.hidden, 1, 0.2f, random),
                        random_vector(size_t(2) * s.intermediate * s.hidden, 0, 0.1f, random),
                        random_vector(size_t(s.hidden) * s.intermediate, 0, 0.1f, random)});
  }
  return w;
}

template <typename T>
int matrix(Executor<T>& executor, int outputs, int inputs, const Vector& data, bool interleave = false) {
  const int index = executor.begin_matrix(outputs, inputs, interleave);
  executor.fill_matrix(index, 0, outputs, data.data());
  return index;
}

Operation operation(Kind kind, int input, int output, int weight) {
  Operation op;
  op.kind = kind;
  op.input = input;
  op.output = output;
  op.weight = weight;
  return op;
}

template <typename T>
std::unique_ptr<Executor<T>> build(const Shape& s, const Weights& w, int threads, GemmKernel<T> kernel) {
  auto executor = std::make_unique<Executor<T>>(threads, kernel);
  const int table = executor->add_rows(s.head_dim), x = executor->add_rows(s.hidden), qkv = executor->add_rows(s.qkv());
  const int attended = executor->add_rows(s.q()), logits = executor->add_rows(s.vocabulary);
  const int normed = executor->add_slabs(s.hidden), q = executor->add_slabs(s.q()), wide = executor->add_slabs(s.intermediate);
  const int attention = executor->add_attention({s.heads, s.kv_heads, s.head_dim, 1.0f / std::sqrt(float(s.head_dim))});
  const int embedding = matrix(*executor, s.vocabulary, s.hidden, w.embedding);
  executor->add_operation(operation(Kind::kRotaryTable, -1, table, executor->add_vector(w.frequencies)));
  executor->add_operation(operation(Kind::kEmbedding, -1, x, embedding));
  for (int i = 0; i < s.layers; ++i) {
    const auto& layer = w.layers[i];
    const auto norm = [&](const Vector& weight) {
      Operation op = operation(Kind::kNorm, x, normed, executor->add_vector(weight));
      op.number = 1e-5f;
      executor->add_operation(op);
    };
    const auto product = [&](int input, int output, int weight, Epilogue epilogue) {
      Operation op = operation(Kind::kProduct, input, output, weight);
      op.epilogue = epilogue;
      executor->add_operation(op);
    };
    norm(layer.norm1);
    const int into = matrix(*executor, s.qkv(), s.hidden, layer.qkv);
    executor->set_bias(into, layer.bias);
    product(normed, qkv, into, Epilogue::kStore);
    Operation rotary = operation(Kind::kRotary, qkv, q, -1);
    rotary.table = table;
    rotary.layer = i;
    rotary.attention = attention;
    executor->add_operation(rotary);
    Operation attend = operation(Kind::kAttention, q, attended, -1);
    attend.layer = i;
    attend.attention = attention;
    executor->add_operation(attend);
    executor->add_operation(operation(Kind::kPack, attended, q, -1));
    product(q, x, matrix(*executor, s.hidden, s.q(), layer.output), Epilogue::kAdd);
    norm(layer.norm2);
    product(normed, wide, matrix(*executor, 2 * s.intermediate, s.hidden, layer.gate_up, true), Epilogue::kSiluMul);
    product(wide, x, matrix(*executor, s.hidden, s.intermediate, layer.down), Epilogue::kAdd);
  }
  Operation last = operation(Kind::kNorm, x, normed, executor->add_vector(w.last_norm));
  last.number = 1e-5f;
  last.selects = last.on_logit_rows = true;
  executor->add_operation(last);
  Operation head = operation(Kind::kProduct, normed, logits, embedding);
  head.on_logit_rows = true;
  executor->add_operation(head);
  return executor;
}

using Prompts = std::vector<std::vector<int>>;
using Logits = std::vector<std::vector<Vector>>;  // [prompt][position][vocabulary]

// Runs prompts side by side, each by its own chunks, in shuffled blocks; logits of every position.
template <typename T>
Logits run(Executor<T>& executor, const Prompts& prompts, const std::vector<int>& chunks, int block_size, unsigned seed) {
  int num_blocks = 0;
  for (const auto& prompt : prompts) num_blocks += (int(prompt.size()) + block_size - 1) / block_size;
  executor.allocate_kv(int(executor.num_layers()), num_blocks, block_size, 0);
  std::vector<int32_t> free(num_blocks);
  std::iota(free.begin(), free.end(), 1);
  std::shuffle(free.begin(), free.end(), std::mt19937(seed));
  std::vector<std::vector<int32_t>> tables(prompts.size());
  size_t width = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (int done = 0; done < int(prompts[i].size()); done += block_size) {
      tables[i].push_back(free.back());
      free.pop_back();
    }
    width = std::max(width, tables[i].size());
  }
  Logits result(prompts.size());
  std::vector<int> done(prompts.size(), 0);
  while (true) {
    std::vector<int32_t> tokens, positions, slots, starts{0}, lengths, table, wanted;
    std::vector<size_t> active;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const int end = std::min(done[i] + chunks[i % chunks.size()], int(prompts[i].size()));
      if (done[i] == end) continue;
      active.push_back(i);
      for (int p = done[i]; p < end; ++p) {
        wanted.push_back(int(tokens.size()));
        tokens.push_back(prompts[i][p]);
        positions.push_back(p);
        slots.push_back(tables[i][p / block_size] * block_size + p % block_size);
      }
      done[i] = end;
      starts.push_back(int(tokens.size()));
      lengths.push_back(end);
      for (size_t b = 0; b < width; ++b) table.push_back(b < tables[i].size() ? tables[i][b] : 0);
    }
    if (active.empty()) return result;
    const Batch batch{int(tokens.size()), int(active.size()), int(wanted.size()), int(width), tokens.data(),
                      positions.data(), slots.data(), starts.data(), lengths.data(), table.data(), wanted.data()};
    executor.check(batch);
    const float* logits = executor.run(batch);
    for (size_t row = 0; row < active.size(); ++row)
      for (int t = starts[row]; t < starts[row + 1]; ++t)
        result[active[row]].emplace_back(logits + size_t(t) * executor.result_width(),
                                         logits + size_t(t + 1) * executor.result_width());
  }
}

using Doubles = std::vector<double>;

Doubles naive_norm(const Doubles& x, const Vector& weight) {
  double squares = 0;
  for (double value : x) squares += value * value;
  Doubles result(x.size());
  for (size_t i = 0; i < x.size(); ++i) result[i] = x[i] / std::sqrt(squares / x.size() + 1e-5) * weight[i];
  return result;
}

Doubles naive_product(const Doubles& x, const Vector& weight, int outputs) {
  Doubles result(outputs, 0.0);
  for (int n = 0; n < outputs; ++n)
    for (size_t k = 0; k < x.size(); ++k) result[n] += x[k] * weight[size_t(n) * x.size() + k];
  return result;
}

std::vector<Doubles> naive(const Shape& s, const Weights& w, const std::vector<int>& tokens) {
  std::vector<Doubles> x;
  for (int token : tokens)
    x.emplace_back(w.embedding.begin() + size_t(token) * s.hidden, w.embedding.begin() + size_t(token + 1) * s.hidden);
  for (const auto& layer : w.layers) {
    std::vector<Doubles> rows;
    for (size_t t = 0; t < tokens.size(); ++t) {
      Doubles row = naive_product(naive_norm(x[t], layer.norm1), layer.qkv, s.qkv());
      for (int i = 0; i < s.qkv(); ++i) row[i] += layer.bias[i];
      for (int head = 0; head < s.heads + s.kv_heads; ++head)
        for (int i = 0; i < s.head_dim / 2; ++i) {
          double& a = row[head * s.head_dim + i];
          double& b = row[head * s.head_dim + s.head_dim / 2 + i];
          const double angle = double(t) * w.frequencies[i], c = std::cos(angle), d = std::sin(angle), old = a;
          a = old * c - b * d;
          b = b * c + old * d;
        }
      rows.push_back(row);
    }
    for (size_t t = 0; t < tokens.size(); ++t) {
      Doubles attended(s.q(), 0.0);
      for (int head = 0; head < s.heads; ++head) {
        const int kv = head / (s.heads / s.kv_heads);
        const size_t k0 = size_t(s.heads + kv) * s.head_dim, v0 = k0 + size_t(s.kv_heads) * s.head_dim;
        Doubles weight(t + 1);
        double most = -1e300, sum = 0;
        for (size_t u = 0; u <= t; ++u) {
          double dot = 0;
          for (int d = 0; d < s.head_dim; ++d) dot += rows[t][head * s.head_dim + d] * rows[u][k0 + d];
          weight[u] = dot / std::sqrt(double(s.head_dim));
          most = std::max(most, weight[u]);
        }
        for (double& value : weight) sum += value = std::exp(value - most);
        for (size_t u = 0; u <= t; ++u)
          for (int d = 0; d < s.head_dim; ++d) attended[head * s.head_dim + d] += weight[u] / sum * rows[u][v0 + d];
      }
      const Doubles output = naive_product(attended, layer.output, s.hidden);
      for (int i = 0; i < s.hidden; ++i) x[t][i] += output[i];
      const Doubles both = naive_product(naive_norm(x[t], layer.norm2), layer.gate_up, 2 * s.intermediate);
      Doubles inner(s.intermediate);
      for (int i = 0; i < s.intermediate; ++i) inner[i] = both[i] / (1 + std::exp(-both[i])) * both[s.intermediate + i];
      const Doubles down = naive_product(inner, layer.down, s.hidden);
      for (int i = 0; i < s.hidden; ++i) x[t][i] += down[i];
    }
  }
  std::vector<Doubles> logits;
  for (const Doubles& row : x) logits.push_back(naive_product(naive_norm(row, w.last_norm), w.embedding, s.vocabulary));
  return logits;
}

int num_failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what);
  ++num_failures;
}

template <typename T>
void check_shape(const Shape& s, GemmKernel<T> kernel, bool against_naive) {
  std::mt19937 random(s.hidden + s.intermediate);
  const Weights weights = random_weights(s, random);
  Prompts prompts;
  for (int length : {1, 5, 16, 17, 40, 66}) {
    std::vector<int> prompt(length);
    for (int& token : prompt) token = int(random() % s.vocabulary);
    prompts.push_back(prompt);
  }
  auto one = build<T>(s, weights, 1, kernel), three = build<T>(s, weights, 3, kernel);
  const Logits expected = run(*one, prompts, {100}, 16, 1);
  expect(run(*one, prompts, {1}, 16, 2) == expected, "token by token");
  expect(run(*three, prompts, {100}, 16, 3) == expected, "three threads");
  expect(run(*three, prompts, {7, 16, 3, 33}, 16, 4) == expected, "chunks");
  expect(run(*three, prompts, {9}, 32, 5) == expected, "blocks of 32");
  for (size_t i = 0; i < prompts.size(); ++i)
    expect(run(*one, {prompts[i]}, {100}, 16, 6)[0] == expected[i], "alone");
  if (!against_naive) return;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto exact = naive(s, weights, prompts[i]);
    double worst = 0;
    for (size_t t = 0; t < exact.size(); ++t)
      for (int n = 0; n < s.vocabulary; ++n) worst = std::max(worst, std::abs(exact[t][n] - double(expected[i][t][n])));
    expect(worst < 2e-3, "float32 agrees with double");
  }
}

// Small, and so no measurement: that it runs, ends and gives a number is what is looked at here.
void check_machine() {
  expect(read_bandwidth(2, size_t(1) << 20) > 0, "a bandwidth");
  expect(round_trip_seconds() >= 0, "a round trip");
  expect(kernel_flops(2, float_kernel()) > 0 && register_flops<float>(2) > 0, "operations in float32");
  expect(kernel_flops(2, bf16_kernel(Isa::kAvx512)) > 0 && register_flops<bf16>(2) > 0, "operations in bfloat16");
  if (cpu_has_amx_bf16()) expect(kernel_flops(2, bf16_kernel(Isa::kAmx)) > 0, "operations on tiles");
}

}  // namespace

int main() {
  if (!cpu_has_avx512_bf16()) {
    std::printf("this CPU has no AVX-512 with BF16: nothing checked\n");
    return 0;
  }
  const std::vector<Shape> shapes = {{64, 96, 4, 2, 16, 61, 2}, {72, 112, 3, 1, 32, 77, 1}, {96, 80, 6, 2, 64, 40, 1}};
  for (const Shape& shape : shapes) {
    check_shape<float>(shape, float_kernel(), true);
    check_shape<bf16>(shape, bf16_kernel(Isa::kAvx512), false);
    if (cpu_has_amx_bf16()) check_shape<bf16>(shape, bf16_kernel(Isa::kAmx), false);
  }
  check_machine();
  std::printf(num_failures ? "%d checks failed\n" : "all checks passed\n", num_failures);
  return num_failures ? 1 : 0;
}
