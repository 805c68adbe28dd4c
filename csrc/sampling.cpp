// Compiled without contraction of a * b + c (CMakeLists.txt): the numbers are those of numpy, which rounds both.
#include "sampling.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace noria {

namespace {

constexpr double kGreedyBelow = 1e-5;  // noria.sampling.GREEDY_BELOW
constexpr int kBlock = 1024;
constexpr int kLong = 4096;  // from here on a row is worth a pass that narrows the work
constexpr int kGroups = 512;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

using Scratch = Sampler::Scratch;

__mmask16 lanes(int left) { return left >= 16 ? 0xFFFF : (1u << left) - 1; }

// Up to 16 numbers; `other` beyond the end.
__m512 load(const float* p, int left, float other) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(other), lanes(left), p);
}

// Stores the numbers that `kept` picks, side by side, and returns how many. Writes a whole register: storing
// part of one by a mask is slow on some CPUs.
int compress(float* to, __mmask16 kept, __m512 x) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, x));
  return __builtin_popcount(kept);
}

int compress(int32_t* to, __mmask16 kept, __m512i x) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(kept, x));
  return __builtin_popcount(kept);
}

__m512i ids_from(int first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

// Adds up floats in double: 8 sums, which are exact for weights.
struct Sum {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  void add(__m512 x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

struct Best {
  float value;
  int32_t id;  // the lowest that has it
  bool has_nan;
};

Best best_of(const float* scores, int n) {
  float best = kMinusInfinity;
  int best_block = 0;
  __mmask16 nan = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = std::min(begin + kBlock, n);
    __m512 most = _mm512_set1_ps(kMinusInfinity), also = most;
    int i = begin;
    for (; i + 32 <= end; i += 32) {
      const __m512 x = _mm512_loadu_ps(scores + i), y = _mm512_loadu_ps(scores + i + 16);
      nan |= _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, x);
      also = _mm512_max_ps(also, y);
    }
    for (; i < end; i += 16) {
      const __m512 x = load(scores + i, end - i, kMinusInfinity);
      nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, x);
    }
    const float value = _mm512_reduce_max_ps(_mm512_max_ps(most, also));
    if (value > best) {
      best = value;
      best_block = begin;
    }
  }
  if (nan) return {best, 0, true};
  int id = best_block;
  while (scores[id] != best) ++id;
  return {best, id, false};
}

// exp((score - best) / temperature) x scale, rounded to integers; 0 where the exponential is below min_p. Operation for
// operation as noria.runner.exponential.
class Weigher {
 public:
  Weigher(float best, double temperature, double min_p, int vocabulary)
      : scale(std::ldexp(1.0, 53 - bit_length(vocabulary))), best_(_mm512_set1_ps(best)),
        temperature_(_mm512_set1_ps(float(temperature))), min_p_(_mm512_set1_ps(float(min_p))),
        scale_(_mm512_set1_ps(float(scale))) {}

  __m512 weights(__m512 scores) const {
    const __m512 x = _mm512_div_ps(_mm512_sub_ps(scores, best_), temperature_);
    const __m512 one = _mm512_set1_ps(1.0f), lowest = _mm512_set1_ps(-80.0f);
    const __mmask16 counts = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
    const __m512 inside = _mm512_max_ps(x, lowest);
    const __m512 n = round(_mm512_mul_ps(inside, _mm512_set1_ps(1.44269504088896341f)));
    __m512 r = _mm512_sub_ps(inside, _mm512_mul_ps(n, _mm512_set1_ps(0.693359375f)));
    r = _mm512_sub_ps(r, _mm512_mul_ps(n, _mm512_set1_ps(-2.12194440e-4f)));
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
      p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(coefficient));
    p = _mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(p, r), r), _mm512_add_ps(r, one));
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    const __m512 power = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
    const __mmask16 kept = counts & _mm512_cmp_ps_mask(power, min_p_, _CMP_GE_OQ);
    return round(_mm512_maskz_mul_ps(kept, power, scale_));
  }

  const double scale;

 private:
  static int bit_length(int n) { return 32 - __builtin_clz(unsigned(n)); }
  static __m512 round(__m512 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  const __m512 best_, temperature_, min_p_, scale_;
};

// The `count` largest of `values` [n], lower positions first on ties: into scratch.values and scratch.ids, in the order
// of positions. 1 <= count <= n.
void largest(const float* values, int n, int count, Scratch& scratch) {
  float* found = scratch.values.data();
  int32_t* ids = scratch.ids.data();
  float threshold = kMinusInfinity;
  if (n >= kLong && count <= kGroups / 2) {
    // The count-th largest of the maxima of 512 disjoint groups is not above the count-th largest of all.
    alignas(64) float maxima[kGroups];
    std::copy(values, values + kGroups, maxima);
    for (int row = kGroups; row + kGroups <= n; row += kGroups)
      for (int i = 0; i < kGroups; i += 16)
        _mm512_store_ps(maxima + i, _mm512_max_ps(_mm512_load_ps(maxima + i), _mm512_loadu_ps(values + row + i)));
    std::nth_element(maxima, maxima + count - 1, maxima + kGroups, std::greater<float>());
    threshold = maxima[count - 1];
  }
  int num_found = 0;
  for (int i = 0; i < n; i += 16) {
    const __m512 x = load(values + i, n - i, kMinusInfinity);
    const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(threshold), _CMP_GE_OQ) & lanes(n - i);
    compress(ids + num_found, kept, ids_from(i));
    num_found += compress(found + num_found, kept, x);
  }
  float* sorted = scratch.sorted.data();
  std::copy(found, found + num_found, sorted);
  std::nth_element(sorted, sorted + count - 1, sorted + num_found, std::greater<float>());
  const float border = sorted[count - 1];
  int ties = count - int(std::count_if(found, found + num_found, [&](float x) { return x > border; }));
  int kept = 0;
  for (int i = 0; i < num_found; ++i) {
    if (found[i] < border || (found[i] == border && ties-- <= 0)) continue;
    found[kept] = found[i];
    ids[kept++] = ids[i];
  }
}

double sum_from(const float* weights, int n, float low) {
  Sum sum;
  for (int i = 0; i < n; i += 16) {
    const __m512 x = load(weights + i, n - i, 0);
    sum.add(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ), x));
  }
  return sum.total();
}

// Keeps those of `weights` [n] that are >= low, or those that are not; returns how many.
int keep(float* weights, int n, float low, bool from_low) {
  int kept = 0;
  for (int i = 0; i < n; i += 16) {
    const __m512 x = load(weights + i, n - i, 0);
    const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ);
    kept += compress(weights + kept, (from_low ? above : __mmask16(~above)) & lanes(n - i), x);
  }
  return kept;
}

struct Border {
  float weight;
  double above;  // the sum of all that are heavier
};

// The largest weight for which those from it up reach `wanted` (above 0), as those from `floor` up do; loses the weights.
// Halves the range of bit patterns, which are in the order of the numbers: at most 31 times.
Border border_of(float* weights, int n, float floor, double wanted) {
  const auto as_float = [](uint32_t bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(bits)))); };
  uint32_t low = uint32_t(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(floor))));  // those from low up reach it
  uint32_t high = 0x7F800000;                                                       // those from high up do not
  double above = 0;                                                                 // the sum of those from high up
  n = keep(weights, n, floor, true);
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const double sum = sum_from(weights, n, as_float(middle));
    const bool reached = above + sum >= wanted;
    n = keep(weights, n, as_float(middle), reached);
    if (reached) {
      low = middle;
    } else {
      above += sum;
      high = middle;
    }
  }
  return {as_float(low), above};
}

// What may still be drawn: weights and, unless position and id are the same, ids.
struct Candidates {
  int n;
  bool has_ids;
  double total;
};

// Leaves the fewest of the heaviest whose sum reaches top_p of the total, lower positions first on ties.
void nucleus(Candidates& candidates, double top_p, Scratch& scratch) {
  float* weights = scratch.weights.data();
  int32_t* ids = scratch.ids.data();
  const int n = candidates.n;
  const double wanted = top_p * candidates.total;
  std::copy(weights, weights + n, scratch.values.data());
  // Tokens lighter than this together weigh at most half of what top-p leaves out, so the border lies above them.
  const float floor = float(0.5 * (candidates.total - wanted) / n);
  const Border border = border_of(scratch.values.data(), n, floor, wanted);
  const double weight = border.weight;
  int num_ties = std::max(1, int(std::ceil((wanted - border.above) / weight)));
  while (border.above + num_ties * weight < wanted) ++num_ties;
  while (num_ties > 1 && border.above + (num_ties - 1) * weight >= wanted) --num_ties;

  int kept = 0, num_equal = 0;
  for (int i = 0; i < n; i += 16) {
    const __m512 x = load(weights + i, n - i, 0);
    const __m512i id = candidates.has_ids ? _mm512_loadu_si512(ids + i) : ids_from(i);
    const __mmask16 inside = _mm512_cmp_ps_mask(x, _mm512_set1_ps(border.weight), _CMP_GE_OQ);
    num_equal += __builtin_popcount(_mm512_cmp_ps_mask(x, _mm512_set1_ps(border.weight), _CMP_EQ_OQ));
    compress(ids + kept, inside, id);
    kept += compress(weights + kept, inside, x);
  }
  if (num_equal > num_ties) {
    int left = num_ties, place = 0;
    for (int i = 0; i < kept; ++i) {
      if (weights[i] == border.weight && left-- <= 0) continue;
      weights[place] = weights[i];
      ids[place++] = ids[i];
    }
    kept = place;
  }
  candidates = {kept, true, border.above + num_ties * weight};
}

// The lowest position whose running sum exceeds `target`, which is below the sum of all.
int pick(const float* weights, int n, double target) {
  double running = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int length = std::min(kBlock, n - begin);
    const double sum = sum_from(weights + begin, length, 0);
    if (running + sum > target)
      for (int i = begin;; ++i)
        if ((running += weights[i]) > target) return i;
    running += sum;
  }
  return n - 1;
}

int32_t draw(const float* scores, int vocabulary, float best, double u, const RowParams& params, Scratch& scratch) {
  const Weigher weigher(best, params.temperature, params.min_p, vocabulary);
  Candidates candidates{vocabulary, false, 0};
  if (params.top_k > 0 && params.top_k < vocabulary) {
    largest(scores, vocabulary, params.top_k, scratch);
    candidates = {params.top_k, true, 0};
    scores = scratch.values.data();
  }
  Sum sum;
  for (int i = 0; i < candidates.n; i += 16) {
    const __m512 weights = weigher.weights(load(scores + i, candidates.n - i, kMinusInfinity));
    sum.add(weights);
    _mm512_storeu_ps(scratch.weights.data() + i, weights);
  }
  candidates.total = sum.total();
  if (params.top_p < 1) nucleus(candidates, params.top_p, scratch);
  const int place = pick(scratch.weights.data(), candidates.n, u * candidates.total);
  return candidates.has_ids ? scratch.ids[place] : place;
}

// Philox4x32-10, as noria.runner.philox: a number in [0, 1) of 53 random bits.
double uniform(uint64_t seed, uint32_t output_position, uint32_t index) {
  uint32_t c[4] = {output_position, index, 0, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
    c[0] = uint32_t(b >> 32) ^ c[1] ^ k0;
    c[1] = uint32_t(b);
    c[2] = uint32_t(a >> 32) ^ c[3] ^ k1;
    c[3] = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

void apply_penalties(const SamplingRows& rows, int row, Scratch& scratch) {
  const RowParams& params = rows.params[row];
  const int32_t* tokens = rows.token_ids + size_t(rows.table_rows[row]) * rows.table_width;
  const int num_tokens = rows.num_tokens[row], num_prompt_tokens = rows.num_prompt_tokens[row];
  uint32_t* counts = scratch.counts.data();  // 1 + how often a token is in the output, for tokens that were seen
  for (int i = 0; i < num_prompt_tokens; ++i) counts[tokens[i]] = 1;
  for (int i = num_prompt_tokens; i < num_tokens; ++i) counts[tokens[i]] += counts[tokens[i]] == 0 ? 2 : 1;
  for (int i = 0; i < num_tokens; ++i) {
    uint32_t& count = counts[tokens[i]];
    if (count == 0) continue;  // has had its turn
    float& score = scratch.scores[tokens[i]];
    double value = score;
    value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
    value -= params.frequency_penalty * double(count - 1);
    value -= params.presence_penalty * (count > 1 ? 1.0 : 0.0);
    // A penalty near 0 can push a score past float32; it must stay comparable, not become infinite.
    score = std::isinf(value) && value < 0 ? kMinusInfinity : float(std::clamp(value, double(-FLT_MAX), double(FLT_MAX)));
    count = 0;
  }
}

void apply_biases(const SamplingRows& rows, int row, float* scores) {
  for (int i = rows.bias_start[row]; i < rows.bias_start[row + 1]; ++i) scores[rows.bias_ids[i]] += rows.biases[i];
}

void apply_mask(const uint32_t* mask, int vocabulary, float* scores) {
  for (int i = 0; i < vocabulary; i += 16) {
    const __mmask16 forbidden = __mmask16(~(mask[i / 32] >> (i % 32))) & lanes(vocabulary - i);
    _mm512_mask_storeu_ps(scores + i, forbidden, _mm512_set1_ps(kMinusInfinity));
  }
}

// As noria.runner.logprobs: from raw scores.
void write_logprobs(const SamplingRows& rows, int row, const float* scores, float best, Scratch& scratch) {
  const int n = rows.vocabulary;
  const int32_t chosen = rows.chosen[row];
  const Weigher weigher(best, 1, 0, n);
  Sum sum;
  int rank = 1;
  for (int i = 0; i < n; i += 16) {
    const __m512 x = load(scores + i, n - i, kMinusInfinity);
    sum.add(weigher.weights(x));
    rank += __builtin_popcount(_mm512_cmp_ps_mask(x, _mm512_set1_ps(scores[chosen]), _CMP_GT_OQ));
  }
  const double log_total = double(best) + std::log(sum.total() / weigher.scale);
  rows.logprobs[row] = double(scores[chosen]) - log_total;
  rows.ranks[row] = rank;
  const int num_top = std::min(rows.params[row].num_top_logprobs, n);
  if (num_top == 0) return;
  largest(scores, n, num_top, scratch);
  std::vector<int>& order = scratch.order;
  order.resize(num_top);  // there is room: no allocation
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scratch.values[a] > scratch.values[b]; });
  for (int i = 0; i < num_top; ++i) {
    const size_t to = size_t(row) * rows.max_top + i;
    rows.top_ids[to] = scratch.ids[order[i]];
    rows.top_logprobs[to] = double(scratch.values[order[i]]) - log_total;
  }
}

void sample_row(const SamplingRows& rows, int row, Scratch& scratch) {
  const RowParams& params = rows.params[row];
  const float* raw = rows.logits + size_t(row) * rows.vocabulary;
  const Best raw_best = best_of(raw, rows.vocabulary);
  if (raw_best.has_nan || !std::isfinite(raw_best.value)) {
    rows.chosen[row] = kUnusable;
    return;
  }
  if (rows.chosen_is_given) {
    if (params.wants_logprobs) write_logprobs(rows, row, raw, raw_best.value, scratch);
    return;
  }
  const float* scores = raw;
  Best best = raw_best;
  const int mask = rows.mask_of_row == nullptr ? -1 : rows.mask_of_row[row];
  if (params.has_penalties() || mask >= 0 || rows.has_biases(row)) {
    std::copy(raw, raw + rows.vocabulary, scratch.scores.data());
    if (rows.has_biases(row)) apply_biases(rows, row, scratch.scores.data());
    if (params.has_penalties()) apply_penalties(rows, row, scratch);
    if (mask >= 0) apply_mask(rows.masks + size_t(mask) * rows.mask_words(), rows.vocabulary, scratch.scores.data());
    scores = scratch.scores.data();
    best = best_of(scores, rows.vocabulary);
    if (best.value == kMinusInfinity) {
      rows.chosen[row] = kNothingAllowed;
      return;
    }
  }
  rows.chosen[row] = best.id;
  if (params.temperature >= kGreedyBelow) {
    const uint32_t position = uint32_t(rows.num_tokens[row] - rows.num_prompt_tokens[row]);
    const double u = uniform(params.seed, position, params.index);
    rows.chosen[row] = draw(scores, rows.vocabulary, best.value, u, params, scratch);
  }
  if (params.wants_logprobs) write_logprobs(rows, row, raw, raw_best.value, scratch);
}

}  // namespace

void SamplingRows::check() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
  };
  require(num_rows == 0 || vocabulary > 0, "logits need a vocabulary");
  for (int row = 0; row < num_rows; ++row) {
    const RowParams& p = params[row];
    require(table_rows[row] >= 0 && table_rows[row] < table_height, "a row is outside the table of tokens");
    require(num_prompt_tokens[row] >= 0 && num_prompt_tokens[row] <= num_tokens[row] && num_tokens[row] <= table_width,
            "a row has more tokens than the table, or fewer than its prompt");
    require(p.top_p > 0 && p.top_p <= 1 && p.min_p >= 0 && p.min_p <= 1, "top_p or min_p leaves nothing to choose");
    require(p.temperature >= 0 && std::isfinite(p.temperature) && p.repetition_penalty > 0,
            "a temperature or repetition penalty is out of range");
    if (p.has_penalties()) {
      const int32_t* tokens = token_ids + size_t(table_rows[row]) * table_width;
      bool inside = true;
      for (int i = 0; i < num_tokens[row]; ++i) inside &= tokens[i] >= 0 && tokens[i] < vocabulary;
      require(inside, "a token id is outside the vocabulary");
    }
    if (mask_of_row != nullptr) require(mask_of_row[row] >= -1 && mask_of_row[row] < num_masks, "a mask is not there");
    if (chosen_is_given) require(chosen[row] >= 0 && chosen[row] < vocabulary, "a given token is outside the vocabulary");
    require(!p.wants_logprobs || (p.num_top_logprobs >= 0 && std::min(p.num_top_logprobs, vocabulary) <= max_top),
            "a row wants more probable tokens than there is room for");
  }
  if (bias_start == nullptr) return;
  require(bias_start[0] == 0 && bias_start[num_rows] == num_biases, "biases and rows do not add up");
  for (int row = 0; row < num_rows; ++row) require(bias_start[row] <= bias_start[row + 1], "biases must follow");
  for (int i = 0; i < num_biases; ++i)
    require(bias_ids[i] >= 0 && bias_ids[i] < vocabulary, "a bias is for a token outside the vocabulary");
}

void Sampler::run(const SamplingRows& rows, ThreadPool& pool) {
  scratch_.resize(size_t(pool.size()));
  const size_t size = size_t(rows.vocabulary) + 16;
  for (Scratch& scratch : scratch_) {
    for (auto* values : {&scratch.scores, &scratch.values, &scratch.weights, &scratch.sorted}) values->resize(size);
    scratch.ids.resize(size);
    scratch.order.reserve(size);
    scratch.counts.resize(size);
  }
  if (rows.num_rows <= 1) {  // not worth waking anybody
    for (int row = 0; row < rows.num_rows; ++row) sample_row(rows, row, scratch_[0]);
    return;
  }
  std::atomic<int> next{0};
  pool.run([&](int thread) {
    for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows.num_rows;)
      sample_row(rows, row, scratch_[size_t(thread)]);
  });
}

}  // namespace noria
