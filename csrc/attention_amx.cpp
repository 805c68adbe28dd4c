// Attention on AMX tiles: 16 rows (queries x heads that share) at a time against 16 keys, then against 16 dimensions.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "attention.h"
#include "tiles.h"
#ifdef NORIA_EMULATE_AMX
#include "tiles_emulated.h"
#endif

namespace noria {

namespace {

constexpr int kTileRows = 16;
constexpr int kRowTiles = 3;  // taken together: 3 accumulators, 3 of rows, 1 of keys or values

// Tiles 0-2 accumulate; 3-5 hold rows: of queries 32 dimensions, of weights 16 keys; 6 holds keys, 7 values: 8 pairs.
const TileConfig kScores = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
const TileConfig kValues = {1, 0, {}, {64, 64, 64, 32, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};

// scores[rows][16] of one group: keys [dim/2][16 slots][2] are weights tiles as they stand.
void score_group(int row_tiles, const bf16* q, int head_dim, const bf16* keys, float* scores) {
  const long q_stride = head_dim * long(sizeof(bf16)), score_stride = kTileKeys * long(sizeof(float));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int d = 0; d < head_dim; d += 32) {
    _tile_loadd(6, keys + d * kGroup, 64);
    _tile_loadd(3, q + d, q_stride);
    _tile_dpbf16ps(0, 3, 6);
    if (row_tiles > 1) {
      _tile_loadd(4, q + kTileRows * head_dim + d, q_stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (row_tiles > 2) {
      _tile_loadd(5, q + 2 * kTileRows * head_dim + d, q_stride);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  _tile_stored(0, scores, score_stride);
  if (row_tiles > 1) _tile_stored(1, scores + kTileRows * kTileKeys, score_stride);
  if (row_tiles > 2) _tile_stored(2, scores + 2 * kTileRows * kTileKeys, score_stride);
}

// out[rows][16 dimensions from d] += weights . values: values [8 slot pairs][dim][2] likewise.
void add_values(int row_tiles, const bf16* weights, const KeyTile<bf16>& tile, int head_dim, int d, float* out) {
  const long out_stride = head_dim * long(sizeof(float)), weight_stride = kTileKeys * long(sizeof(bf16));
  _tile_loadd(0, out + d, out_stride);
  if (row_tiles > 1) _tile_loadd(1, out + kTileRows * head_dim + d, out_stride);
  if (row_tiles > 2) _tile_loadd(2, out + 2 * kTileRows * head_dim + d, out_stride);
  for (int g = 0; g < tile.num_groups; ++g) {
    const bf16* own = weights + g * kGroup;
    _tile_loadd(7, tile.values[g] + 2 * d, head_dim * 2 * long(sizeof(bf16)));
    _tile_loadd(3, own, weight_stride);
    _tile_dpbf16ps(0, 3, 7);
    if (row_tiles > 1) {
      _tile_loadd(4, own + kTileRows * kTileKeys, weight_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (row_tiles > 2) {
      _tile_loadd(5, own + 2 * kTileRows * kTileKeys, weight_stride);
      _tile_dpbf16ps(2, 5, 7);
    }
  }
  _tile_stored(0, out + d, out_stride);
  if (row_tiles > 1) _tile_stored(1, out + kTileRows * head_dim + d, out_stride);
  if (row_tiles > 2) _tile_stored(2, out + 2 * kTileRows * head_dim + d, out_stride);
}

// Keys and values of a group.
inline void prefetch(const AttentionShape& shape, const bf16* keys) {
  const size_t bytes = 2 * shape.part_elements() * sizeof(bf16);
  for (size_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(keys) + line, _MM_HINT_T0);
}

}  // namespace

void attend_amx(const AttentionShape& shape, const AttentionItem<bf16>& item, const AttentionItem<bf16>* following,
                float* scratch, SlabsView<bf16> out, int first_row) {
  const int shared = shape.shared(), head_dim = shape.head_dim, rows = item.num_queries * shared;
  const int row_tiles = (rows + kTileRows - 1) / kTileRows, padded_rows = row_tiles * kTileRows;
  float* sums = scratch;                                                                 // [rows][head_dim]
  float* scores = sums + size_t(padded_rows) * head_dim;                                 // [rows][64]
  bf16* q = reinterpret_cast<bf16*>(scores + size_t(padded_rows) * kTileKeys);           // [rows][head_dim]
  bf16* weights = q + size_t(padded_rows) * head_dim;                                    // [rows][64]
  float* maximum = reinterpret_cast<float*>(weights + size_t(padded_rows) * kTileKeys);  // [rows]
  float* weight_sums = maximum + padded_rows;
  std::fill(sums, sums + size_t(padded_rows) * head_dim, 0.0f);
  std::fill(q + size_t(rows) * head_dim, q + size_t(padded_rows) * head_dim, bf16(0));
  std::fill(weights + size_t(rows) * kTileKeys, weights + size_t(padded_rows) * kTileKeys, bf16(0));
  for (int r = 0; r < rows; ++r) {
    const bf16* from = item.q + r / shared * item.q_stride + size_t(item.kv_head * shared + r % shared) * head_dim;
    std::copy(from, from + head_dim, q + size_t(r) * head_dim);
    maximum[r] = -std::numeric_limits<float>::infinity();
    weight_sums[r] = 0;
  }

  const __m512 scale = _mm512_set1_ps(shape.scale);
  walk_tiles(shape, item, following, [&](const KeyTile<bf16>& tile) {
    _tile_loadconfig(&kScores);
    for (int g = 0; g < tile.num_groups; ++g) {
      prefetch(shape, tile.next_keys[g]);
      for (int t = 0; t < row_tiles; t += kRowTiles) {
        const size_t row = size_t(t) * kTileRows;
        score_group(std::min(kRowTiles, row_tiles - t), q + row * head_dim, head_dim, tile.keys[g],
                    scores + row * kTileKeys + g * kGroup);
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* own = scores + size_t(r) * kTileKeys;
      for (int k = 0; k < tile.num_groups * kGroup; k += 16)
        _mm512_storeu_ps(own + k, _mm512_mul_ps(_mm512_loadu_ps(own + k), scale));
      const float decay = soften(own, tile.first_key, item.first_position + r / shared, maximum[r], weight_sums[r],
                                 weights + size_t(r) * kTileKeys);
      float* own_sums = sums + size_t(r) * head_dim;
      for (int d = 0; d < head_dim; d += 16)
        _mm512_storeu_ps(own_sums + d, _mm512_mul_ps(_mm512_loadu_ps(own_sums + d), _mm512_set1_ps(decay)));
    }
    _tile_loadconfig(&kValues);
    for (int t = 0; t < row_tiles; t += kRowTiles) {
      const size_t row = size_t(t) * kTileRows;
      for (int d = 0; d < head_dim; d += 16)
        add_values(std::min(kRowTiles, row_tiles - t), weights + row * kTileKeys, tile, head_dim, d, sums + row * head_dim);
    }
  });
  _tile_loadconfig(&kScores);  // which is that of the products as well
  finish_rows(shape, item, sums, weight_sums, out, first_row);
}

}  // namespace noria
