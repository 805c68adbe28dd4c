#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "numbers.h"

namespace noria {

namespace {

constexpr int kScoreRows = 4;   // rows of scores per pass over a tile of keys: 4 x 4 accumulators and 4 of keys
constexpr int kValueRows = 6;   // rows of results per pass over the values: 6 x 4 accumulators and 4 of values

// scores[r][g * 16 + slot] = scale x q[r] . key, for R rows and G groups of keys. R x G sums are independent of each other,
// which is what keeps the multipliers busy when there are few rows.
template <int R, int G>
void score_groups(const bf16* const* q, const bf16* const* keys, int head_dim, __m512 scale, float* const* scores) {
  __m512 sums[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sums[r][g] = _mm512_setzero_ps();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    __m512bh k[G];
    for (int g = 0; g < G; ++g) k[g] = (__m512bh)_mm512_loadu_si512(keys[g] + pair * 2 * kGroup);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int both = *reinterpret_cast<const int*>(q[r] + 2 * pair);
      const __m512bh own = (__m512bh)_mm512_set1_epi32(both);
      for (int g = 0; g < G; ++g) sums[r][g] = _mm512_dpbf16_ps(sums[r][g], k[g], own);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(scores[r] + g * kGroup, _mm512_mul_ps(sums[r][g], scale));
}

template <int R, int G>
void score_groups(const float* const* q, const float* const* keys, int head_dim, __m512 scale, float* const* scores) {
  __m512 sums[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sums[r][g] = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; ++d) {
    __m512 k[G];
    for (int g = 0; g < G; ++g) k[g] = _mm512_loadu_ps(keys[g] + d * kGroup);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 own = _mm512_set1_ps(q[r][d]);
      for (int g = 0; g < G; ++g) sums[r][g] = _mm512_fmadd_ps(own, k[g], sums[r][g]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(scores[r] + g * kGroup, _mm512_mul_ps(sums[r][g], scale));
}

// Asks for the memory of some keys or values of one group ahead of their use.
inline void prefetch(const void* data, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) _mm_prefetch(static_cast<const char*>(data) + line, _MM_HINT_T0);
}

// out[r][64 dims from d] = out x decay[r] + p[r] . values of `num_groups` groups.
template <int R, int V>
void add_values(const bf16* const* p, const bf16* const* groups, int num_groups, int head_dim, int d,
                const float* decay, float* const* out) {
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(out[r] + d + 16 * v), _mm512_set1_ps(decay[r]));
  for (int g = 0; g < num_groups; ++g) {
    const bf16* values = groups[g] + 2 * d;
    for (int pair = 0; pair < kGroup / 2; ++pair, values += 2 * head_dim) {
      __m512bh x[V];
      for (int v = 0; v < V; ++v) x[v] = (__m512bh)_mm512_loadu_si512(values + 32 * v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const int both = *reinterpret_cast<const int*>(p[r] + g * kGroup + 2 * pair);
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x[v], weight);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(out[r] + d + 16 * v, sums[r][v]);
}

template <int R, int V>
void add_values(const float* const* p, const float* const* groups, int num_groups, int head_dim, int d,
                const float* decay, float* const* out) {
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(out[r] + d + 16 * v), _mm512_set1_ps(decay[r]));
  for (int g = 0; g < num_groups; ++g) {
    const float* values = groups[g] + d;
    for (int slot = 0; slot < kGroup; ++slot, values += head_dim) {
      __m512 x[V];
      for (int v = 0; v < V; ++v) x[v] = _mm512_loadu_ps(values + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(p[r][g * kGroup + slot]);
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_fmadd_ps(weight, x[v], sums[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(out[r] + d + 16 * v, sums[r][v]);
}

template <int R, typename T>
void add_all_values(const T* const* p, const T* const* groups, int num_groups, int head_dim, const float* decay,
                    float* const* out) {
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) add_values<R, 4>(p, groups, num_groups, head_dim, d, decay, out);
  for (; d < head_dim; d += 16) add_values<R, 1>(p, groups, num_groups, head_dim, d, decay, out);
}

template <int R, typename T>
void score_some(int num_groups, const T* const* q, const T* const* keys, int head_dim, __m512 scale,
                float* const* scores) {
  switch (num_groups) {
    case 1: return score_groups<R, 1>(q, keys, head_dim, scale, scores);
    case 2: return score_groups<R, 2>(q, keys, head_dim, scale, scores);
    case 3: return score_groups<R, 3>(q, keys, head_dim, scale, scores);
    case 4: return score_groups<R, 4>(q, keys, head_dim, scale, scores);
  }
}

template <typename T>
void score_rows(int rows, int num_groups, const T* const* q, const T* const* keys, int head_dim, __m512 scale,
                float* const* scores) {
  switch (rows) {
    case 1: return score_some<1>(num_groups, q, keys, head_dim, scale, scores);
    case 2: return score_some<2>(num_groups, q, keys, head_dim, scale, scores);
    case 3: return score_some<3>(num_groups, q, keys, head_dim, scale, scores);
    case 4: return score_some<4>(num_groups, q, keys, head_dim, scale, scores);
  }
}

template <typename T>
void value_rows(int rows, const T* const* p, const T* const* groups, int num_groups, int head_dim, const float* decay,
                float* const* out) {
  switch (rows) {
    case 1: return add_all_values<1>(p, groups, num_groups, head_dim, decay, out);
    case 2: return add_all_values<2>(p, groups, num_groups, head_dim, decay, out);
    case 3: return add_all_values<3>(p, groups, num_groups, head_dim, decay, out);
    case 4: return add_all_values<4>(p, groups, num_groups, head_dim, decay, out);
    case 5: return add_all_values<5>(p, groups, num_groups, head_dim, decay, out);
    case 6: return add_all_values<6>(p, groups, num_groups, head_dim, decay, out);
  }
}

}  // namespace

template <typename T>
float soften(const float* scores, int first_key, int position, float& maximum, float& sum, T* weights) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 s[kTileGroups];
  __m512 most = hidden;
  for (int g = 0; g < kTileGroups; ++g) {
    const int num_seen = std::clamp(position + 1 - first_key - g * kGroup, 0, kGroup);
    const __mmask16 seen = __mmask16((1u << num_seen) - 1);
    s[g] = _mm512_mask_loadu_ps(hidden, seen, scores + g * kGroup);
    most = _mm512_max_ps(most, s[g]);
  }
  const float highest = std::max(maximum, _mm512_reduce_max_ps(most));
  const __m512 shift = _mm512_set1_ps(highest);
  __m512 total = _mm512_setzero_ps();
  for (int g = 0; g < kTileGroups; ++g) {
    const __m512 w = exp16(_mm512_sub_ps(s[g], shift));
    total = _mm512_add_ps(total, w);
    store16(weights + g * kGroup, w);
  }
  const float decay = _mm512_cvtss_f32(exp16(_mm512_set1_ps(maximum - highest)));
  sum = sum * decay + _mm512_reduce_add_ps(total);
  maximum = highest;
  return decay;
}

size_t attention_scratch_floats(const AttentionShape& shape, int num_queries) {
  const size_t rows = (size_t(num_queries) * shape.shared() + 15) / 16 * 16;
  return rows * (2 * size_t(shape.head_dim) + 2 * kTileKeys + 4) + 64;
}

template <typename T>
void attend(const AttentionShape& shape, const AttentionItem<T>& item, float* scratch, float* result,
            size_t result_stride) {
  const int shared = shape.shared(), head_dim = shape.head_dim, rows = item.num_queries * shared;
  float* out = scratch;                              // [rows][head_dim]
  float* scores = out + size_t(rows) * head_dim;     // [rows][64]
  T* weights = reinterpret_cast<T*>(scores + size_t(rows) * kTileKeys);  // [rows][64]
  float* maximum = scores + 2 * size_t(rows) * kTileKeys;
  float* sum = maximum + rows;
  float* decay = sum + rows;
  for (int r = 0; r < rows; ++r) {
    maximum[r] = -std::numeric_limits<float>::infinity();
    sum[r] = 0;
  }
  std::fill(out, out + size_t(rows) * head_dim, 0.0f);

  const __m512 scale = _mm512_set1_ps(shape.scale);
  const size_t group_elements = shape.group_elements();
  const size_t part = shape.part_elements(), head_offset = 2 * item.kv_head * part;
  const int last_position = item.first_position + item.num_queries - 1;
  const int num_row_groups = last_position / kGroup + 1;
  const T* q[kScoreRows];
  float* score_at[kScoreRows];
  const T* weight_at[kValueRows];
  float* out_at[kValueRows];

  const auto group_start = [&](int group) {
    const size_t index =
        size_t(item.blocks[group / item.groups_per_block]) * item.groups_per_block + group % item.groups_per_block;
    return index * group_elements + head_offset;
  };
  for (int first_group = 0; first_group < num_row_groups; first_group += kTileGroups) {
    const int num_groups = std::min(kTileGroups, num_row_groups - first_group);
    const T* key_groups[kTileGroups];
    const T* value_groups[kTileGroups];
    for (int g = 0; g < num_groups; ++g) {
      const size_t start = group_start(first_group + g);
      key_groups[g] = item.pool + start;
      value_groups[g] = key_groups[g] + part;
      if (first_group + g + kTileGroups < num_row_groups)
        prefetch(item.pool + group_start(first_group + g + kTileGroups), 2 * part * sizeof(T));
    }
    for (int r0 = 0; r0 < rows; r0 += kScoreRows) {
      const int n = std::min(kScoreRows, rows - r0);
      for (int r = 0; r < n; ++r) {
        const int query = (r0 + r) / shared, head = item.kv_head * shared + (r0 + r) % shared;
        q[r] = item.q + query * item.q_stride + size_t(head) * head_dim;
        score_at[r] = scores + size_t(r0 + r) * kTileKeys;
      }
      score_rows(n, num_groups, q, key_groups, head_dim, scale, score_at);
    }
    for (int r = 0; r < rows; ++r) {
      decay[r] = soften(scores + size_t(r) * kTileKeys, first_group * kGroup, item.first_position + r / shared,
                        maximum[r], sum[r], weights + size_t(r) * kTileKeys);
    }
    for (int r0 = 0; r0 < rows; r0 += kValueRows) {
      const int n = std::min(kValueRows, rows - r0);
      for (int r = 0; r < n; ++r) {
        weight_at[r] = weights + size_t(r0 + r) * kTileKeys;
        out_at[r] = out + size_t(r0 + r) * head_dim;
      }
      value_rows(n, weight_at, value_groups, num_groups, head_dim, decay + r0, out_at);
    }
  }

  for (int r = 0; r < rows; ++r) {
    const int query = r / shared, head = item.kv_head * shared + r % shared;
    float* target = result + query * result_stride + size_t(head) * head_dim;
    const __m512 share = _mm512_set1_ps(1.0f / sum[r]);
    for (int d = 0; d < head_dim; d += 16)
      _mm512_storeu_ps(target + d, _mm512_mul_ps(_mm512_loadu_ps(out + size_t(r) * head_dim + d), share));
  }
}

template <typename T>
void write_kv(const AttentionShape& shape, T* pool, int64_t slot, const float* k, const float* v) {
  const int head_dim = shape.head_dim;
  const int offset = int(slot % kGroup);
  T* group = pool + size_t(slot / kGroup) * shape.group_elements();
  constexpr int kStep = sizeof(T) == 2 ? 2 : 1;  // elements that stand together
  const __m512 largest = _mm512_set1_ps(3.3895e38f);  // the largest bfloat16
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    T* key = group + 2 * head * shape.part_elements();
    T* value = key + shape.part_elements();
    T from_k[kMaxHeadDim], from_v[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += 16) {
      store16(from_k + d, _mm512_loadu_ps(k + size_t(head) * head_dim + d));
      __m512 x = _mm512_loadu_ps(v + size_t(head) * head_dim + d);
      x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
      x = _mm512_max_ps(_mm512_min_ps(x, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
      store16(from_v + d, x);
    }
    for (int d = 0; d < head_dim; ++d) {
      key[(d / kStep) * kGroup * kStep + offset * kStep + d % kStep] = from_k[d];
      value[size_t(offset / kStep) * head_dim * kStep + d * kStep + offset % kStep] = from_v[d];
    }
  }
}

template void attend(const AttentionShape&, const AttentionItem<bf16>&, float*, float*, size_t);
template void attend(const AttentionShape&, const AttentionItem<float>&, float*, float*, size_t);
template float soften(const float*, int, int, float&, float&, bf16*);
template void write_kv(const AttentionShape&, bf16*, int64_t, const float*, const float*);
template void write_kv(const AttentionShape&, float*, int64_t, const float*, const float*);

}  // namespace noria
