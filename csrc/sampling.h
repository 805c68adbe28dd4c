// Chooses one token for each row of logits: biases, penalties, mask, temperature, min-p, top-k, top-p, one random number; and the
// log-probabilities of what was chosen. The same tokens and the same bits as noria.runner.sampler, which says what each
// step means. A row is one thread's work and sees nothing of its neighbours.
//
// Weights are integers in float32, scaled so that a sum over the whole vocabulary stays below 2^53. So every sum is
// exact in double, whatever its order, and borders can be found by whatever is fastest.
#pragma once

#include <cstdint>
#include <vector>

#include "threads.h"

namespace noria {

// ROW_PARAMS of noria.runner.row_params, field by field.
struct RowParams {
  double temperature;
  int32_t top_k;  // 0: off
  double top_p, min_p;
  double repetition_penalty, presence_penalty, frequency_penalty;
  uint64_t seed;
  uint32_t index;
  bool wants_logprobs;
  int32_t num_top_logprobs;

  bool has_penalties() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
};

// In place of a token: the row has NaN, +inf or nothing but -inf; its mask leaves nothing that could be drawn.
constexpr int32_t kUnusable = -1;
constexpr int32_t kNothingAllowed = -2;

// The rows of a step that sample. Pointers are the caller's; arrays have an entry for each row unless it says otherwise.
struct SamplingRows {
  int num_rows, vocabulary;
  const float* logits;  // [num_rows][vocabulary]
  const RowParams* params;
  // Known tokens, prompt first: row r has the first num_tokens[r] of token_ids[table_rows[r]].
  int table_height, table_width;
  const int32_t* token_ids;  // [table_height][table_width]
  const int64_t* table_rows;
  const int32_t* num_tokens;
  const int32_t* num_prompt_tokens;
  // Bit i % 32 of word i / 32 is set where token i is allowed. Without masks, both are null.
  int num_masks = 0;
  const uint32_t* masks = nullptr;       // [num_masks][mask_words()]
  const int32_t* mask_of_row = nullptr;  // -1: all is allowed
  // Row r has the biases bias_start[r] .. bias_start[r + 1], no token twice. Without biases, all are null.
  int num_biases = 0;
  const int32_t* bias_start = nullptr;  // [num_rows + 1]
  const int32_t* bias_ids = nullptr;
  const float* biases = nullptr;
  // Nothing is chosen: `chosen` comes filled, and only the log-probabilities are wanted.
  bool chosen_is_given = false;
  // Results. The log-probabilities are only written for rows that want them, and only the first
  // min(num_top_logprobs, vocabulary) of the most probable tokens.
  int max_top;
  int32_t* chosen;
  double* logprobs;
  int32_t* ranks;
  int32_t* top_ids;      // [num_rows][max_top]
  double* top_logprobs;  // [num_rows][max_top]

  int mask_words() const { return (vocabulary + 31) / 32; }
  bool has_biases(int row) const { return bias_start != nullptr && bias_start[row] < bias_start[row + 1]; }

  // Raises std::invalid_argument if anything names a token, a row or a mask that is not there.
  void check() const;
};

class Sampler {
 public:
  // `rows` must have been checked.
  void run(const SamplingRows& rows, ThreadPool& pool);

  // What one thread needs: room for a vocabulary each, and 16 numbers more, as stores are of whole registers.
  struct Scratch {
    std::vector<float> scores, values, weights, sorted;
    std::vector<int32_t> ids;
    std::vector<int> order;
    std::vector<uint32_t> counts;  // all 0 between rows
  };

 private:
  std::vector<Scratch> scratch_;  // per thread
};

}  // namespace noria
