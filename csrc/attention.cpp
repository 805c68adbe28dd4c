#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "numbers.h"

namespace noria {

namespace {

constexpr int kScoreRows = 4;   // rows of scores per pass over a tile of keys: 4 x 4 accumulators and 4 of keys
constexpr int kValueRows = 6;   // rows of results per pass over the values: 6 x 4 accumulators and 4 of values

inline void prefetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }

// scores[r][g * 16 + slot] = q[r] . key, for R rows and G groups of keys. R x G sums are independent of each other,
// which is what keeps the multipliers busy when there are few rows.
template <int R, int G, typename T>
void score_groups(const T* const* q, const KeyTile<T>& tile, int head_dim, float* const* scores) {
  using L = Lanes<T>;
  __m512 sums[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sums[r][g] = _mm512_setzero_ps();
  for (int d = 0; d < head_dim; d += L::kDepth) {
    typename L::Vector k[G];
    for (int g = 0; g < G; ++g) {
      k[g] = L::load(tile.keys[g] + d * kGroup);
      prefetch(tile.next_keys[g] + d * kGroup);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto own = L::spread(q[r] + d);
      for (int g = 0; g < G; ++g) sums[r][g] = L::add_product(sums[r][g], k[g], own);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) _mm512_storeu_ps(scores[r] + g * kGroup, sums[r][g]);
}

// out[r][16 x V dimensions from d] = out x decay[r] + weights[r] . values
template <int R, int V, typename T>
void add_values(const T* const* weights, const KeyTile<T>& tile, int head_dim, int d, const float* decay, float* const* out) {
  using L = Lanes<T>;
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(out[r] + d + 16 * v), _mm512_set1_ps(decay[r]));
  for (int g = 0; g < tile.num_groups; ++g) {
    for (int slot = 0; slot < kGroup; slot += L::kDepth) {
      const int offset = slot * head_dim + d * L::kDepth;
      typename L::Vector x[V];
      for (int v = 0; v < V; ++v) {
        x[v] = L::load(tile.values[g] + offset + 16 * L::kDepth * v);
        prefetch(tile.next_values[g] + offset + 16 * L::kDepth * v);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const auto weight = L::spread(weights[r] + g * kGroup + slot);
        for (int v = 0; v < V; ++v) sums[r][v] = L::add_product(sums[r][v], x[v], weight);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(out[r] + d + 16 * v, sums[r][v]);
}

template <int R, typename T>
void add_all_values(const T* const* weights, const KeyTile<T>& tile, int head_dim, const float* decay, float* const* out) {
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) add_values<R, 4>(weights, tile, head_dim, d, decay, out);
  for (; d < head_dim; d += 16) add_values<R, 1>(weights, tile, head_dim, d, decay, out);
}

template <int R, typename T>
void score_some(const T* const* q, const KeyTile<T>& tile, int head_dim, float* const* scores) {
  switch (tile.num_groups) {
    case 1: return score_groups<R, 1>(q, tile, head_dim, scores);
    case 2: return score_groups<R, 2>(q, tile, head_dim, scores);
    case 3: return score_groups<R, 3>(q, tile, head_dim, scores);
    case 4: return score_groups<R, 4>(q, tile, head_dim, scores);
  }
}

template <typename T>
void score_rows(int rows, const T* const* q, const KeyTile<T>& tile, int head_dim, float* const* scores) {
  switch (rows) {
    case 1: return score_some<1>(q, tile, head_dim, scores);
    case 2: return score_some<2>(q, tile, head_dim, scores);
    case 3: return score_some<3>(q, tile, head_dim, scores);
    case 4: return score_some<4>(q, tile, head_dim, scores);
  }
}

template <typename T>
void value_rows(int rows, const T* const* weights, const KeyTile<T>& tile, int head_dim, const float* decay,
                float* const* out) {
  switch (rows) {
    case 1: return add_all_values<1>(weights, tile, head_dim, decay, out);
    case 2: return add_all_values<2>(weights, tile, head_dim, decay, out);
    case 3: return add_all_values<3>(weights, tile, head_dim, decay, out);
    case 4: return add_all_values<4>(weights, tile, head_dim, decay, out);
    case 5: return add_all_values<5>(weights, tile, head_dim, decay, out);
    case 6: return add_all_values<6>(weights, tile, head_dim, decay, out);
  }
}

// One head's keys [dim] into [dim / depth][16 slots][depth], all `depth` that stand together at once.
void scatter_keys(bf16* to, int offset, const bf16* from, int head_dim) {
  for (int d = 0; d < head_dim; d += 2) std::memcpy(to + d * kGroup + 2 * offset, from + d, 4);
}

void scatter_keys(float* to, int offset, const float* from, int head_dim) {
  for (int d = 0; d < head_dim; ++d) to[d * kGroup + offset] = from[d];
}

// 16 values into [slots / depth][dim][depth]: every other number of two slots' pairs, or in a row.
void scatter_values(bf16* to, int offset, int head_dim, int d, __m512 values) {
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values));
  const bool is_second = offset % 2;
  _mm512_mask_storeu_epi16(to + offset / 2 * head_dim * 2 + d * 2, is_second ? 0xAAAAAAAA : 0x55555555,
                           is_second ? _mm512_slli_epi32(wide, 16) : wide);
}

void scatter_values(float* to, int offset, int head_dim, int d, __m512 values) {
  _mm512_storeu_ps(to + offset * head_dim + d, values);
}

// Scales and caps a row's scores of one tile, in place. Returns what they are to be scaled by now. Apart, so that the
// registers of `soften` are not filled with it where nothing is capped.
[[gnu::noinline]] float cap(const AttentionShape& shape, float* scores) {
  for (int g = 0; g < kTileGroups; ++g) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + g * kGroup), _mm512_set1_ps(shape.scale));
    _mm512_storeu_ps(scores + g * kGroup, soft_cap16(scaled, shape.soft_cap));
  }
  return 1;
}

}  // namespace

template <typename T>
float soften(const AttentionShape& shape, float* scores, int first_key, int position, float& maximum, float* sums,
             T* weights) {
  const int end = position + 1 - first_key, begin = end - shape.window;  // of the keys in the tile that are seen
  if (begin >= kTileKeys) {  // It is all before the window: nothing has been seen yet, not even a maximum.
    for (int g = 0; g < kTileGroups; ++g) store16(weights + g * kGroup, _mm512_setzero_ps());
    return 1;
  }
  const float scale = shape.soft_cap > 0 ? cap(shape, scores) : shape.scale;
  __m512 s[kTileGroups];
  if (begin <= 0 && end >= kTileKeys) {
    for (int g = 0; g < kTileGroups; ++g) s[g] = _mm512_loadu_ps(scores + g * kGroup);
  } else {
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const auto keys_before = [](int key, int g) { return (1u << std::clamp(key - g * kGroup, 0, kGroup)) - 1; };
    for (int g = 0; g < kTileGroups; ++g) {
      const __mmask16 seen = __mmask16(keys_before(end, g) & ~keys_before(begin, g));
      s[g] = _mm512_mask_loadu_ps(hidden, seen, scores + g * kGroup);
    }
  }
  const __m512 most = _mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3]));
  const float highest = std::max(maximum, _mm512_reduce_max_ps(most));
  const __m512 shift = _mm512_set1_ps(highest), factor = _mm512_set1_ps(scale);
  __m512 total = _mm512_loadu_ps(sums);
  float decay = 1;
  if (highest != maximum) {
    const __m512 decays = softmax16<T>(_mm512_set1_ps((maximum - highest) * scale));
    total = _mm512_mul_ps(total, decays);
    decay = _mm512_cvtss_f32(decays);
    maximum = highest;
  }
  for (int g = 0; g < kTileGroups; ++g) {
    const __m512 w = softmax16<T>(_mm512_mul_ps(_mm512_sub_ps(s[g], shift), factor));
    total = _mm512_add_ps(total, w);
    store16(weights + g * kGroup, w);
  }
  _mm512_storeu_ps(sums, total);
  return decay;
}

size_t attention_scratch_floats(const AttentionShape& shape, int num_queries) {
  const size_t rows = (size_t(num_queries) * shape.shared() + 15) / 16 * 16;
  return rows * (2 * size_t(shape.head_dim) + 2 * kTileKeys + kGroup + 2) + 64;
}

template <typename T>
void attend(const AttentionShape& shape, const AttentionItem<T>& item, const AttentionItem<T>* following, float* scratch,
            SlabsView<T> out, int first_row) {
  const int shared = shape.shared(), head_dim = shape.head_dim, rows = item.num_queries * shared;
  float* sums = scratch;                             // [rows][head_dim]
  float* scores = sums + size_t(rows) * head_dim;    // [rows][64]
  T* weights = reinterpret_cast<T*>(scores + size_t(rows) * kTileKeys);  // [rows][64]
  float* maximum = scores + 2 * size_t(rows) * kTileKeys;
  float* decay = maximum + rows;
  float* weight_sums = decay + rows;  // [rows][16]
  std::fill(maximum, maximum + rows, -std::numeric_limits<float>::infinity());
  std::fill(weight_sums, weight_sums + size_t(rows) * kGroup, 0.0f);
  std::fill(sums, sums + size_t(rows) * head_dim, 0.0f);

  const T* q[kScoreRows];
  float* score_at[kScoreRows];
  const T* weight_at[kValueRows];
  float* sums_at[kValueRows];
  walk_tiles(shape, item, following, [&](const KeyTile<T>& tile) {
    for (int r0 = 0; r0 < rows; r0 += kScoreRows) {
      const int n = std::min(kScoreRows, rows - r0);
      for (int r = 0; r < n; ++r) {
        const int query = (r0 + r) / shared, head = item.kv_head * shared + (r0 + r) % shared;
        q[r] = item.q + query * item.q_stride + size_t(head) * head_dim;
        score_at[r] = scores + size_t(r0 + r) * kTileKeys;
      }
      score_rows(n, q, tile, head_dim, score_at);
    }
    for (int r = 0; r < rows; ++r) {
      decay[r] = soften(shape, scores + size_t(r) * kTileKeys, tile.first_key, item.first_position + r / shared, maximum[r],
                        weight_sums + size_t(r) * kGroup, weights + size_t(r) * kTileKeys);
    }
    for (int r0 = 0; r0 < rows; r0 += kValueRows) {
      const int n = std::min(kValueRows, rows - r0);
      for (int r = 0; r < n; ++r) {
        weight_at[r] = weights + size_t(r0 + r) * kTileKeys;
        sums_at[r] = sums + size_t(r0 + r) * head_dim;
      }
      value_rows(n, weight_at, tile, head_dim, decay + r0, sums_at);
    }
  });
  finish_rows(shape, item, sums, weight_sums, out, first_row);
}

template <typename T>
void finish_rows(const AttentionShape& shape, const AttentionItem<T>& item, const float* sums, const float* weight_sums,
                 SlabsView<T> out, int first_row) {
  const int shared = shape.shared(), head_dim = shape.head_dim, rows = item.num_queries * shared;
  for (int r = 0; r < rows; ++r) {
    const int row = first_row + r / shared, first_column = (item.kv_head * shared + r % shared) * head_dim;
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_loadu_ps(weight_sums + size_t(r) * kGroup)));
    for (int d = 0; d < head_dim; d += 16)
      store16(out.at(row, first_column + d), _mm512_mul_ps(_mm512_loadu_ps(sums + size_t(r) * head_dim + d), share));
    const int end = first_column + head_dim;
    if (end == shape.width() && end % kSlab != 0) store16(out.at(row, end), _mm512_setzero_ps());
  }
}

template <typename T>
void write_kv(const AttentionShape& shape, T* pool, int64_t slot, const float* k, const float* v) {
  const int head_dim = shape.head_dim, offset = int(slot % kGroup);
  T* group = pool + size_t(slot / kGroup) * shape.group_elements();
  const __m512 largest = _mm512_set1_ps(3.3895e38f);  // the largest bfloat16
  for (int head = 0; head < shape.num_kv_heads; ++head, k += head_dim, v += head_dim) {
    T* keys = group + 2 * head * shape.part_elements();
    T* values = keys + shape.part_elements();
    T rounded[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += 16) {
      store16(rounded + d, _mm512_loadu_ps(k + d));
      __m512 x = _mm512_loadu_ps(v + d);
      x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
      x = _mm512_max_ps(_mm512_min_ps(x, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
      scatter_values(values, offset, head_dim, d, x);
    }
    scatter_keys(keys, offset, rounded, head_dim);
  }
}

template void attend(const AttentionShape&, const AttentionItem<bf16>&, const AttentionItem<bf16>*, float*, SlabsView<bf16>, int);
template void attend(const AttentionShape&, const AttentionItem<float>&, const AttentionItem<float>*, float*, SlabsView<float>, int);
template void finish_rows(const AttentionShape&, const AttentionItem<bf16>&, const float*, const float*, SlabsView<bf16>, int);
template float soften(const AttentionShape&, float*, int, int, float&, float*, bf16*);
template void write_kv(const AttentionShape&, bf16*, int64_t, const float*, const float*);
template void write_kv(const AttentionShape&, float*, int64_t, const float*, const float*);

}  // namespace noria
