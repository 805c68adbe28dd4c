// The sampler, checked: random rows of all kinds, several threads against one row at a time, and the most probable tokens
// against a sorted row.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "sampling.h"

using namespace noria;

namespace {

// Rows with every kind of parameter over logits with ties, -inf and NaN, and what the sampler made of them.
struct Sampled {
  std::vector<int32_t> chosen, ranks, top_ids;
  std::vector<double> logprobs, top_logprobs;
};

struct SamplingCase {
  static constexpr int kTokens = 40, kTop = 5;
  int num_rows, vocabulary, mask_words;
  Vector logits;
  std::vector<RowParams> params;
  std::vector<int32_t> token_ids, num_tokens, num_prompt_tokens, mask_of_row, bias_start, bias_ids;
  Vector biases;
  std::vector<int64_t> table_rows;
  std::vector<uint32_t> masks;

  SamplingCase(int rows, int size, std::mt19937& random)
      : num_rows(rows), vocabulary(size), mask_words((size + 31) / 32),
        logits(random_vector(size_t(rows) * size, 0, 2, random)), masks(2 * size_t(mask_words)) {
    for (int row = 0; row < rows; ++row) {
      RowParams p{};
      p.temperature = row % 3 == 0 ? 0 : 0.5 + row % 4 * 0.4;
      p.top_k = row % 5 == 0 ? 0 : 1 + int(random() % (row % 2 ? size + 5 : 20));
      p.top_p = row % 4 == 0 ? 1 : 0.1 + random() % 90 * 0.01;
      p.min_p = row % 6 == 0 ? 0.05 : 0;
      p.repetition_penalty = row % 4 == 1 ? 1.5 : 1;
      p.frequency_penalty = row % 8 == 2 ? 0.5 : 0;
      p.seed = random();
      p.index = uint32_t(row);
      p.wants_logprobs = row % 2 == 0;
      p.num_top_logprobs = row % (kTop + 1);
      params.push_back(p);
      float* x = logits.data() + size_t(row) * size;
      if (row % 7 == 3)
        for (int i = 0; i < size; ++i) x[i] = std::round(x[i]);
      if (row % 7 == 4)
        for (int i = 1; i < size; ++i) x[i] = i % 3 ? -INFINITY : x[i];
      if (row % 7 == 5) x[random() % size] = NAN;
      num_tokens.push_back(1 + int(random() % kTokens));
      num_prompt_tokens.push_back(int(random() % (num_tokens.back() + 1)));
      table_rows.push_back(rows - 1 - row);
      mask_of_row.push_back(row % 3 - 1);
    }
    for (int row = 0; row <= rows; ++row) {
      bias_start.push_back(int32_t(bias_ids.size()));
      if (row == rows || row % 9 != 6) continue;
      bias_ids.push_back(int32_t(random() % size));  // one token is lifted above all others
      biases.push_back(1000);
    }
    for (int i = 0; i < rows * kTokens; ++i) token_ids.push_back(int32_t(random() % size));
    for (uint32_t& word : masks) word = uint32_t(random());
    masks[0] |= 1;
    masks[size_t(mask_words)] |= 1;
  }

  // Rows begin .. end - 1, in one call; with `given`, only the log-probabilities of those tokens.
  Sampled sample(Sampler& sampler, ThreadPool& pool, int begin, int end, const std::vector<int32_t>& given = {}) const {
    Sampled found;
    const size_t count = size_t(end - begin);
    found.chosen.resize(count);
    found.ranks.resize(count);
    found.logprobs.resize(count);
    found.top_ids.resize(count * kTop);
    found.top_logprobs.resize(count * kTop);
    SamplingRows rows;
    rows.num_rows = int(count);
    rows.vocabulary = vocabulary;
    rows.logits = logits.data() + size_t(begin) * vocabulary;
    rows.params = params.data() + begin;
    rows.table_height = num_rows;
    rows.table_width = kTokens;
    rows.token_ids = token_ids.data();
    rows.table_rows = table_rows.data() + begin;
    rows.num_tokens = num_tokens.data() + begin;
    rows.num_prompt_tokens = num_prompt_tokens.data() + begin;
    rows.num_masks = 2;
    rows.masks = masks.data();
    rows.mask_of_row = mask_of_row.data() + begin;
    std::vector<int32_t> starts(bias_start.begin() + begin, bias_start.begin() + end + 1);
    const int32_t first_bias = starts[0];
    for (int32_t& start : starts) start -= first_bias;
    rows.num_biases = starts.back();
    rows.bias_start = starts.data();
    rows.bias_ids = bias_ids.data() + first_bias;
    rows.biases = biases.data() + first_bias;
    rows.chosen_is_given = !given.empty();
    std::copy(given.begin(), given.end(), found.chosen.begin());
    rows.max_top = kTop;
    rows.chosen = found.chosen.data();
    rows.logprobs = found.logprobs.data();
    rows.ranks = found.ranks.data();
    rows.top_ids = found.top_ids.data();
    rows.top_logprobs = found.top_logprobs.data();
    rows.check();
    sampler.run(rows, pool);
    return found;
  }
};

}  // namespace

void check_sampling(int num_rows, int vocabulary) {
  std::mt19937 random(vocabulary);
  const SamplingCase rows(num_rows, vocabulary, random);
  ThreadPool one(1), three(3);
  Sampler sampler;
  const Sampled together = rows.sample(sampler, three, 0, num_rows);
  for (int row = 0; row < num_rows; ++row) {
    const Sampled alone = rows.sample(sampler, one, row, row + 1);
    const int32_t chosen = together.chosen[row];
    expect(alone.chosen[0] == chosen, "a row's token alone and among others");
    expect((chosen == kUnusable) == (row % 7 == 5), "NaN makes its row unusable, and no other");
    if (chosen < 0) continue;
    const int mask = rows.mask_of_row[row];
    if (rows.bias_start[row] < rows.bias_start[row + 1]) {
      const int32_t lifted = rows.bias_ids[rows.bias_start[row]];
      const bool is_free = mask < 0 || rows.masks[size_t(mask) * rows.mask_words + lifted / 32] >> lifted % 32 & 1;
      const bool is_possible = rows.logits[size_t(row) * vocabulary + lifted] > -INFINITY;
      expect(chosen == lifted || !is_free || !is_possible, "a great bias decides, where the mask lets it");
    }
    expect(mask < 0 || rows.masks[size_t(mask) * rows.mask_words + chosen / 32] >> chosen % 32 & 1, "the mask holds");
    if (!rows.params[row].wants_logprobs) continue;
    const float* x = rows.logits.data() + size_t(row) * vocabulary;
    double sum = 0;
    for (int i = 0; i < vocabulary; ++i) sum += std::exp(double(x[i]));
    expect(together.logprobs[row] == alone.logprobs[0], "a row's log-probability alone and among others");
    const Sampled given = rows.sample(sampler, one, row, row + 1, {chosen});
    expect(given.chosen[0] == chosen && given.logprobs[0] == alone.logprobs[0] && given.ranks[0] == alone.ranks[0],
           "a given token's log-probability is that of the chosen one");
    expect(std::abs(together.logprobs[row] - (x[chosen] - std::log(sum))) < 1e-5, "log-probabilities agree with double");
    std::vector<int> order(vocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
    for (int i = 0; i < std::min(rows.params[row].num_top_logprobs, vocabulary); ++i)
      expect(together.top_ids[size_t(row) * SamplingCase::kTop + i] == order[i], "the most probable tokens");
  }
}
