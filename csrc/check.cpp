// A program of its own that runs the executor without Python, for the sanitizers (`make sanitize`): random weights and
// shapes, rows cut into chunks, beside each other and in shuffled blocks, one thread and several. It checks that every
// result is the same bits, and close to a naive computation in double. Built with NORIA_EMULATE_AMX it runs the AMX kernels
// on any machine. Then the sampler (check_sampling.cpp).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "executor.h"
#include "machine.h"

using namespace noria;

int num_failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what);
  ++num_failures;
}

Vector random_vector(size_t size, float mean, float spread, std::mt19937& random) {
  std::normal_distribution<float> normal(mean, spread);
  Vector values(size);
  for (float& value : values) value = normal(random);
  return values;
}

namespace {

struct Shape {
  int hidden, intermediate, heads, kv_heads, head_dim, vocabulary, layers;
  // With these it is not Llama any more: a window, capped scores, partial rotation, norms of heads, GELU, norms of what is
  // added, a scaled embedding and head.
  int window = 0;
  bool is_further() const { return window > 0; }
  int rotary_dim() const { return is_further() ? head_dim / 2 : head_dim; }
  static constexpr float kSoftCap = 2, kScale = 0.5f;
  int qkv() const { return (heads + 2 * kv_heads) * head_dim; }
  int q() const { return heads * head_dim; }
};

struct Weights {
  Vector embedding, frequencies, last_norm;
  struct Layer {
    Vector norm1, qkv, bias, output, norm2, gate_up, down, q_norm, k_norm, post_norm;
  };
  std::vector<Layer> layers;
};

Weights random_weights(const Shape& s, std::mt19937& random) {
  Weights w;
  w.embedding = random_vector(size_t(s.vocabulary) * s.hidden, 0, 1, random);
  w.last_norm = random_vector(s.hidden, 1, 0.2f, random);
  for (int i = 0; i < s.rotary_dim() / 2; ++i) w.frequencies.push_back(std::pow(10000.0f, -2.0f * i / s.rotary_dim()));
  for (int layer = 0; layer < s.layers; ++layer) {
    w.layers.push_back({random_vector(s.hidden, 1, 0.2f, random),
                        random_vector(size_t(s.qkv()) * s.hidden, 0, 0.1f, random),
                        random_vector(s.qkv(), 0, 0.1f, random),
                        random_vector(size_t(s.hidden) * s.q(), 0, 0.1f, random),
                        random_vector(s.hidden, 1, 0.2f, random),
                        random_vector(size_t(2) * s.intermediate * s.hidden, 0, 0.1f, random),
                        random_vector(size_t(s.hidden) * s.intermediate, 0, 0.1f, random),
                        random_vector(s.head_dim, 1, 0.2f, random),
                        random_vector(s.head_dim, 1, 0.2f, random),
                        random_vector(s.hidden, 1, 0.2f, random)});
  }
  return w;
}

template <typename T>
int matrix(Executor<T>& executor, int outputs, int inputs, const Vector& data, bool interleave = false) {
  const int index = executor.begin_matrix(outputs, inputs, interleave);
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
  const EncodedRows rows{bytes, encoding_of("F32"), outputs};
  executor.fill_matrix(index, 0, rows, 0, outputs / 3);
  executor.fill_matrix(index, 0, rows, outputs / 3, outputs);
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
  const int table = executor->add_rows(s.rotary_dim()), x = executor->add_rows(s.hidden), qkv = executor->add_rows(s.qkv());
  const int logits = executor->add_rows(s.vocabulary), attended = executor->add_slabs(s.q());
  const int normed = executor->add_slabs(s.hidden), q = executor->add_slabs(s.q()), wide = executor->add_slabs(s.intermediate);
  const int branch = executor->add_rows(s.hidden);
  AttentionShape shape{s.heads, s.kv_heads, s.head_dim, 1.0f / std::sqrt(float(s.head_dim))};
  shape.rotary_dim = s.rotary_dim();
  if (s.is_further()) {
    shape.window = s.window;
    shape.soft_cap = Shape::kSoftCap;
  }
  const int attention = executor->add_attention(shape);
  const int embedding = matrix(*executor, s.vocabulary, s.hidden, w.embedding);
  executor->add_operation(operation(Kind::kRotaryTable, -1, table, executor->add_vector(w.frequencies)));
  Operation embed = operation(Kind::kEmbedding, -1, x, embedding);
  if (s.is_further()) embed.factor = Shape::kScale;
  executor->add_operation(embed);
  for (int i = 0; i < s.layers; ++i) {
    const auto& layer = w.layers[i];
    const auto norm = [&](const Vector& weight) {
      Operation op = operation(Kind::kNorm, x, normed, executor->add_vector(weight));
      op.epsilon = 1e-5f;
      executor->add_operation(op);
    };
    const auto product = [&](int input, int output, int weight, Epilogue epilogue) {
      Operation op = operation(Kind::kProduct, input, output, weight);
      op.epilogue = epilogue;
      executor->add_operation(op);
    };
    const auto add = [&](int input, int weight) {
      if (!s.is_further()) return product(input, x, weight, Epilogue::kAdd);
      product(input, branch, weight, Epilogue::kStore);
      Operation op = operation(Kind::kNormAdd, branch, x, executor->add_vector(layer.post_norm));
      op.epsilon = 1e-5f;
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
    if (s.is_further()) {
      rotary.q_norm = executor->add_vector(layer.q_norm);
      rotary.k_norm = executor->add_vector(layer.k_norm);
      rotary.epsilon = 1e-5f;
    }
    executor->add_operation(rotary);
    Operation attend = operation(Kind::kAttention, q, attended, -1);
    attend.layer = i;
    attend.attention = attention;
    executor->add_operation(attend);
    add(attended, matrix(*executor, s.hidden, s.q(), layer.output));
    norm(layer.norm2);
    product(normed, wide, matrix(*executor, 2 * s.intermediate, s.hidden, layer.gate_up, true),
            s.is_further() ? Epilogue::kGeluMul : Epilogue::kSiluMul);
    add(wide, matrix(*executor, s.hidden, s.intermediate, layer.down));
  }
  Operation last = operation(Kind::kNorm, x, normed, executor->add_vector(w.last_norm));
  last.epsilon = 1e-5f;
  last.selects = last.on_logit_rows = true;
  executor->add_operation(last);
  Operation head = operation(Kind::kProduct, normed, logits, embedding);
  head.on_logit_rows = true;
  if (s.is_further()) {
    head.factor = Shape::kScale;
    head.soft_cap = Shape::kSoftCap;
  }
  executor->add_operation(head);
  return executor;
}

using Prompts = std::vector<std::vector<int>>;
using Logits = std::vector<std::vector<Vector>>;  // [prompt][position][vocabulary]

// Runs prompts side by side, each by its own chunks, in shuffled blocks; logits of every position. Blocks that are before
// the window (of all layers) of a row's first query are none of its own any more: their numbers lead out of all memory.
template <typename T>
Logits run(Executor<T>& executor, const Prompts& prompts, const std::vector<int>& chunks, int block_size, unsigned seed,
           int window = 0) {
  int num_blocks = 0;
  for (const auto& prompt : prompts) num_blocks += (int(prompt.size()) + block_size - 1) / block_size;
  executor.allocate_kv(int(executor.num_layers()), num_blocks, block_size, 0);
  if (seed % 2) executor.touch_kv();
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
    const Batch batch{int(tokens.size()), int(active.size()), int(wanted.size()), int(width), 1, tokens.data(),
                      positions.data(), slots.data(), starts.data(), lengths.data(), table.data(), wanted.data()};
    executor.check(batch);
    for (size_t row = 0; row < active.size(); ++row) {
      const int first_seen = window == 0 ? 0 : std::max(positions[starts[row]] + 1 - window, 0);
      std::fill_n(table.begin() + row * width, first_seen / block_size, INT32_MAX);
    }
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

double naive_cap(double x) { return Shape::kSoftCap * std::tanh(x / Shape::kSoftCap); }

std::vector<Doubles> naive(const Shape& s, const Weights& w, const std::vector<int>& tokens) {
  std::vector<Doubles> x;
  for (int token : tokens)
    x.emplace_back(w.embedding.begin() + size_t(token) * s.hidden, w.embedding.begin() + size_t(token + 1) * s.hidden);
  if (s.is_further())
    for (Doubles& row : x)
      for (double& value : row) value *= Shape::kScale;
  for (const auto& layer : w.layers) {
    std::vector<Doubles> rows;
    for (size_t t = 0; t < tokens.size(); ++t) {
      Doubles row = naive_product(naive_norm(x[t], layer.norm1), layer.qkv, s.qkv());
      for (int i = 0; i < s.qkv(); ++i) row[i] += layer.bias[i];
      const int half = s.rotary_dim() / 2;
      for (int head = 0; head < s.heads + s.kv_heads; ++head) {
        const auto begin = row.begin() + head * s.head_dim, end = begin + s.head_dim;
        if (s.is_further()) {
          const Doubles normed = naive_norm(Doubles(begin, end), head < s.heads ? layer.q_norm : layer.k_norm);
          std::copy(normed.begin(), normed.end(), begin);
        }
        for (int i = 0; i < half; ++i) {
          double& a = row[head * s.head_dim + i];
          double& b = row[head * s.head_dim + half + i];
          const double angle = double(t) * w.frequencies[i], c = std::cos(angle), d = std::sin(angle), old = a;
          a = old * c - b * d;
          b = b * c + old * d;
        }
      }
      rows.push_back(row);
    }
    for (size_t t = 0; t < tokens.size(); ++t) {
      Doubles attended(s.q(), 0.0);
      for (int head = 0; head < s.heads; ++head) {
        const int kv = head / (s.heads / s.kv_heads);
        const size_t k0 = size_t(s.heads + kv) * s.head_dim, v0 = k0 + size_t(s.kv_heads) * s.head_dim;
        const size_t first = s.is_further() ? size_t(std::max(int(t) + 1 - s.window, 0)) : 0;
        Doubles weight(t + 1 - first);
        double most = -1e300, sum = 0;
        for (size_t u = first; u <= t; ++u) {
          double dot = 0;
          for (int d = 0; d < s.head_dim; ++d) dot += rows[t][head * s.head_dim + d] * rows[u][k0 + d];
          double& score = weight[u - first] = dot / std::sqrt(double(s.head_dim));
          if (s.is_further()) score = naive_cap(score);
          most = std::max(most, score);
        }
        for (double& value : weight) sum += value = std::exp(value - most);
        for (size_t u = first; u <= t; ++u)
          for (int d = 0; d < s.head_dim; ++d)
            attended[head * s.head_dim + d] += weight[u - first] / sum * rows[u][v0 + d];
      }
      const auto add = [&](const Doubles& branch) {
        const Doubles added = s.is_further() ? naive_norm(branch, layer.post_norm) : branch;
        for (int i = 0; i < s.hidden; ++i) x[t][i] += added[i];
      };
      add(naive_product(attended, layer.output, s.hidden));
      const Doubles both = naive_product(naive_norm(x[t], layer.norm2), layer.gate_up, 2 * s.intermediate);
      Doubles inner(s.intermediate);
      for (int i = 0; i < s.intermediate; ++i) {
        const double gate = both[i], cubic = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
        const double gated = s.is_further() ? gate / 2 * (1 + std::tanh(cubic)) : gate / (1 + std::exp(-gate));
        inner[i] = gated * both[s.intermediate + i];
      }
      add(naive_product(inner, layer.down, s.hidden));
    }
  }
  std::vector<Doubles> logits;
  for (const Doubles& row : x) {
    logits.push_back(naive_product(naive_norm(row, w.last_norm), w.embedding, s.vocabulary));
    if (s.is_further())
      for (double& logit : logits.back()) logit = naive_cap(logit * Shape::kScale);
  }
  return logits;
}

template <typename T>
void check_shape(const Shape& s, GemmKernel<T> kernel, double tolerance) {
  std::mt19937 random(s.hidden + s.intermediate);
  const Weights weights = random_weights(s, random);
  Prompts prompts;
  for (int length : {1, 5, 16, 17, 40, s.is_further() ? 150 : 66}) {
    std::vector<int> prompt(length);
    for (int& token : prompt) token = int(random() % s.vocabulary);
    prompts.push_back(prompt);
  }
  auto one = build<T>(s, weights, 1, kernel), three = build<T>(s, weights, 3, kernel);
  const Logits expected = run(*one, prompts, {200}, 16, 1, s.window);
  expect(run(*one, prompts, {1}, 16, 2, s.window) == expected, "token by token");
  expect(run(*three, prompts, {200}, 16, 3, s.window) == expected, "three threads");
  expect(run(*three, prompts, {7, 16, 3, 33}, 16, 4, s.window) == expected, "chunks");
  expect(run(*three, prompts, {9}, 32, 5, s.window) == expected, "blocks of 32");
  for (size_t i = 0; i < prompts.size(); ++i)
    expect(run(*one, {prompts[i]}, {200}, 16, 6, s.window)[0] == expected[i], "alone");
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto exact = naive(s, weights, prompts[i]);
    double worst = 0;
    for (size_t t = 0; t < exact.size(); ++t)
      for (int n = 0; n < s.vocabulary; ++n) worst = std::max(worst, std::abs(exact[t][n] - double(expected[i][t][n])));
    expect(worst < tolerance, "close to a naive computation in double");
  }
}

// Every byte may stand in a file: random ones, in memory that ends where the blocks end.
void check_encodings() {
  std::mt19937 random(1);
  for (const Encoding& encoding : encodings()) {
    for (size_t num_blocks : {1, 3, 16, 17}) {
      std::vector<uint8_t> blocks(num_blocks * encoding.block_bytes);
      for (uint8_t& byte : blocks) byte = uint8_t(random());
      Vector together(num_blocks * encoding.block_values), one(encoding.block_values);
      encoding.decode(blocks.data(), num_blocks, together.data());
      for (size_t i = 0; i < num_blocks; ++i) {
        encoding.decode(blocks.data() + i * encoding.block_bytes, 1, one.data());
        expect(!std::memcmp(one.data(), &together[i * one.size()], one.size() * sizeof(float)), encoding.name);
      }
    }
  }
}

// Two heads of 4 rows each: pairs that stand side by side in the file are two rows apart in ours.
void check_interleaved_heads() {
  const EncodedRows rows{nullptr, encoding_of("F32"), 8, 2};
  const int expected[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (int row = 0; row < 8; ++row) expect(rows.place_in_file(row) == expected[row], "interleaved heads");
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
  check_encodings();
  check_interleaved_heads();
  const std::vector<Shape> shapes = {{64, 96, 4, 2, 16, 61, 2}, {72, 112, 3, 1, 32, 77, 1},     {96, 80, 6, 2, 64, 40, 1},
                                     {48, 64, 4, 2, 32, 50, 2, 9}, {64, 48, 2, 1, 256, 40, 1, 37}};
  for (const Shape& shape : shapes) {
    check_shape<float>(shape, float_kernel(), 2e-4);
    check_shape<bf16>(shape, bf16_kernel(Isa::kAvx512), 0.4);
    if (cpu_has_amx_bf16()) check_shape<bf16>(shape, bf16_kernel(Isa::kAmx), 0.4);
  }
  for (int vocabulary : {1, 15, 16, 100, 1025, 5003}) check_sampling(60, vocabulary);
  check_machine();
  std::printf(num_failures ? "%d checks failed\n" : "all checks passed\n", num_failures);
  return num_failures ? 1 : 0;
}
