// The executor's operations that look at one row at a time, and what becomes of a product's sums.
#include <immintrin.h>

#include <cmath>

#include "executor.h"
#include "numbers.h"

namespace noria {

namespace {

// The first numbers of 16, of so many that are left.
inline __mmask16 mask_of(int left) { return left >= 16 ? 0xFFFF : left > 0 ? __mmask16((1u << left) - 1) : 0; }

// 1 / sqrt(mean(x^2) + epsilon)
inline float norm_factor(const float* x, int width, float epsilon) {
  __m512 squares = _mm512_setzero_ps();
  for (int k = 0; k < width; k += 16) {
    const __m512 v = _mm512_maskz_loadu_ps(mask_of(width - k), x + k);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + epsilon);
}

// Each head by itself, in place.
void norm_heads(float* x, int num_heads, int head_dim, const float* weight, float epsilon) {
  for (int head = 0; head < num_heads; ++head, x += head_dim) {
    const __m512 factors = _mm512_set1_ps(norm_factor(x, head_dim, epsilon));
    for (int d = 0; d < head_dim; d += 16)
      _mm512_storeu_ps(x + d, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + d), factors), _mm512_loadu_ps(weight + d)));
  }
}

// Turns a head's pairs (i, i + half) by angles whose cosines, then sines, the table has.
inline void rotate(float* head, int half, const float* table) {
  float* second = head + half;
  for (int i = 0; i < half; i += 16) {
    const __mmask16 mask = mask_of(half - i);
    const __m512 a = _mm512_maskz_loadu_ps(mask, head + i), b = _mm512_maskz_loadu_ps(mask, second + i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, table + i), s = _mm512_maskz_loadu_ps(mask, table + half + i);
    _mm512_mask_storeu_ps(head + i, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    _mm512_mask_storeu_ps(second + i, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

// Of a panel's outputs; zeros where a product has none.
struct Bias {
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  Bias(const std::vector<float>& bias, int panel) {
    if (bias.empty()) return;
    low = _mm512_loadu_ps(bias.data() + panel * kPanel);
    high = _mm512_loadu_ps(bias.data() + panel * kPanel + 16);
  }
};

}  // namespace

template <typename T>
void Executor<T>::embedding(const Operation& op, int begin, int end) {
  const Matrix& matrix = *matrices_[op.weight];
  Rows& out = rows_[op.output];
  for (int row = begin; row < end; ++row) {
    float* to = out.data() + size_t(row) * out.width;
    const T* from = matrix.data.data();
    for (int k = 0; k < matrix.inputs; ++k)
      to[k] = to_float(from[packed_index(matrix, batch_->token_ids[row], k)]) * op.factor;
  }
}

// rows -> slabs: x / sqrt(mean(x^2) + eps) * weight
template <typename T>
void Executor<T>::norm(const Operation& op, int begin, int end) {
  const Rows& in = rows_[op.input];
  const SlabsView<T> out = view(op.output, row_count(op));
  const std::vector<float>& weight = vectors_[op.weight];
  const int width = in.width;
  for (int row = begin; row < end; ++row) {
    const float* x = in.data() + size_t(op.selects ? batch_->logit_tokens[row] : row) * width;
    const __m512 factors = _mm512_set1_ps(norm_factor(x, width, op.epsilon));
    for (int k = 0; k < int(padded(width)); k += 16) {
      const __mmask16 mask = mask_of(width - k);
      const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k), factors);
      store16(out.at(row, k), _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight.data() + k)));
    }
  }
}

// rows: out += x / sqrt(mean(x^2) + eps) * weight
template <typename T>
void Executor<T>::norm_add(const Operation& op, int begin, int end) {
  const Rows& in = rows_[op.input];
  Rows& out = rows_[op.output];
  const std::vector<float>& weight = vectors_[op.weight];
  const int width = in.width;
  for (int row = begin; row < end; ++row) {
    const float* x = in.data() + size_t(row) * width;
    float* to = out.data() + size_t(row) * width;
    const __m512 factors = _mm512_set1_ps(norm_factor(x, width, op.epsilon));
    for (int k = 0; k < width; k += 16) {
      const __mmask16 mask = mask_of(width - k);
      const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k), factors);
      const __m512 normed = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight.data() + k));
      _mm512_mask_storeu_ps(to + k, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to + k), normed));
    }
  }
}

// A block's sums are gates and what they gate, 16 of each: what they give goes into the next product's input.
template <typename T>
template <typename Activation>
void Executor<T>::finish_gated(const Block& block, int begin, int end, Activation activation) {
  const Bias bias(block.matrix->bias, block.panel);
  const SlabsView<T> out = view(block.op->output, block.num_rows);
  const int column = block.panel * 16, width = slabs_[block.op->output].width;
  const __mmask16 mask = mask_of(width - column);
  const bool is_last_half = column % kSlab == 0 && column + 16 >= width;
  for (int r = begin; r < end; ++r) {
    const __m512 gate = _mm512_add_ps(_mm512_loadu_ps(block.sums + r * kPanel), bias.low);
    const __m512 up = _mm512_add_ps(_mm512_loadu_ps(block.sums + r * kPanel + 16), bias.high);
    T* to = out.at(block.first_row + r, column);
    store16(to, _mm512_maskz_mov_ps(mask, _mm512_mul_ps(activation(gate), up)));
    if (is_last_half) store16(to + 16, _mm512_setzero_ps());
  }
}

// What becomes of a block's sums.
template <typename T>
void Executor<T>::finish_rows(const Block& block, int begin, int end) {
  const Operation& op = *block.op;
  if (op.epilogue == Epilogue::kSiluMul) return finish_gated(block, begin, end, [](__m512 x) { return silu16(x); });
  if (op.epilogue == Epilogue::kGeluMul) return finish_gated(block, begin, end, [](__m512 x) { return gelu16(x); });
  const Bias bias(block.matrix->bias, block.panel);
  Rows& out = rows_[op.output];
  const int column = block.panel * kPanel, left = block.matrix->outputs - column;
  const __mmask16 low = mask_of(left), high = mask_of(left - 16);
  const __m512 factor = _mm512_set1_ps(op.factor);
  for (int r = begin; r < end; ++r) {
    float* to = out.data() + size_t(block.first_row + r) * out.width + column;
    __m512 y0 = _mm512_mul_ps(_mm512_add_ps(_mm512_loadu_ps(block.sums + r * kPanel), bias.low), factor);
    __m512 y1 = _mm512_mul_ps(_mm512_add_ps(_mm512_loadu_ps(block.sums + r * kPanel + 16), bias.high), factor);
    if (op.epilogue == Epilogue::kAdd) {
      y0 = _mm512_add_ps(_mm512_maskz_loadu_ps(low, to), y0);
      y1 = _mm512_add_ps(_mm512_maskz_loadu_ps(high, to + 16), y1);
    } else if (op.soft_cap > 0) {
      y0 = soft_cap16(y0, op.soft_cap);
      y1 = soft_cap16(y1, op.soft_cap);
    }
    _mm512_mask_storeu_ps(to, low, y0);
    _mm512_mask_storeu_ps(to + 16, high, y1);
  }
}

// rows: cosines, then sines, of position x frequency
template <typename T>
void Executor<T>::rotary_table(const Operation& op, int begin, int end) {
  const std::vector<float>& frequencies = vectors_[op.weight];
  const int half = int(frequencies.size());
  Rows& out = rows_[op.output];
  for (int row = begin; row < end; ++row) {
    float* to = out.data() + size_t(row) * out.width;
    for (int i = 0; i < half; ++i) {
      const float angle = float(batch_->positions[row]) * frequencies[i];
      to[i] = std::cos(angle) * op.factor;
      to[half + i] = std::sin(angle) * op.factor;
    }
  }
}

// rows [q | k | v] -> rotated q in T, row by row in a slabs buffer; k and v into their slots.
template <typename T>
void Executor<T>::rotary(const Operation& op, int begin, int end) {
  const AttentionShape& shape = shapes_[op.attention];
  const int head_dim = shape.head_dim, half = shape.rotary_dim / 2;
  const int q_size = shape.num_heads * head_dim, kv_size = shape.num_kv_heads * head_dim;
  Rows& in = rows_[op.input];
  T* q = slabs_[op.output].data.data();
  T* pool = pools_[place(op.layer).array].data();
  const int32_t* slots = batch_->slots_of(place(op.layer).group);
  for (int row = begin; row < end; ++row) {
    float* x = in.data() + size_t(row) * in.width;
    if (op.q_norm >= 0) norm_heads(x, shape.num_heads, head_dim, vectors_[op.q_norm].data(), op.epsilon);
    if (op.k_norm >= 0) norm_heads(x + q_size, shape.num_kv_heads, head_dim, vectors_[op.k_norm].data(), op.epsilon);
    if (op.table >= 0) {
      const float* table = rows_[op.table].data() + size_t(row) * shape.rotary_dim;
      for (int head = 0; head < shape.num_heads + shape.num_kv_heads; ++head) rotate(x + head * head_dim, half, table);
    }
    for (int i = 0; i < q_size; i += 16) store16(q + size_t(row) * q_size + i, _mm512_loadu_ps(x + i));
    write_kv(shape, pool, slots[row], x + q_size, x + q_size + kv_size);
  }
}

#define NORIA_INSTANTIATE(T)                                                       \
  template void Executor<T>::embedding(const Operation&, int, int);                \
  template void Executor<T>::norm(const Operation&, int, int);                     \
  template void Executor<T>::norm_add(const Operation&, int, int);                 \
  template void Executor<T>::finish_rows(const Executor<T>::Block&, int, int);     \
  template void Executor<T>::rotary_table(const Operation&, int, int);             \
  template void Executor<T>::rotary(const Operation&, int, int);
NORIA_INSTANTIATE(bf16)
NORIA_INSTANTIATE(float)

}  // namespace noria
