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
constexpr int kSums = 4;  // accumulators: groups of keys while scoring, 16 dimensions each while adding values

// Tiles 0-3 accumulate; 4 holds queries (32 dimensions), 5 keys; 6 weights of 16 keys, 7 their values as 8 pairs. So one
// configuration does for both halves.
constexpr TileConfig configuration(int rows) {
  TileConfig config{1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {}};
  for (int tile : {0, 1, 2, 3, 4, 6}) config.rows[tile] = uint8_t(rows);
  config.rows[5] = 16;
  config.rows[7] = 8;
  return config;
}

// By rows: multiplying takes as long as there are.
struct Configurations {
  TileConfig of_rows[kTileRows + 1];
};
constexpr Configurations all_configurations() {
  Configurations all{};
  for (int rows = 1; rows <= kTileRows; ++rows) all.of_rows[rows] = configuration(rows);
  return all;
}
const Configurations kConfigurations = all_configurations();
const TileConfig kProducts = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

inline void prefetch(const bf16* from, int num_lines) {
  for (int line = 0; line < num_lines; ++line) _mm_prefetch(reinterpret_cast<const char*>(from) + 64 * line, _MM_HINT_T0);
}

// scores[rows][16 x groups]: keys [dim/2][16 slots][2] are weights tiles as they stand. Asks for the next keys, if `fetches`.
template <int G>
void score_groups(const bf16* q, int head_dim, const KeyTile<bf16>& tile, bool fetches, float* scores) {
  const long score_stride = kTileKeys * long(sizeof(float));
  _tile_zero(0);
  if constexpr (G > 1) _tile_zero(1);
  if constexpr (G > 2) _tile_zero(2);
  if constexpr (G > 3) _tile_zero(3);
  const auto load_keys = [&](int g, int d) {
    if (fetches) prefetch(tile.next_keys[g] + d * kGroup, 16);
    _tile_loadd(5, tile.keys[g] + d * kGroup, 64);
  };
  for (int d = 0; d < head_dim; d += 32) {
    _tile_loadd(4, q + d, head_dim * long(sizeof(bf16)));
    load_keys(0, d);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (G > 1) {
      load_keys(1, d);
      _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (G > 2) {
      load_keys(2, d);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (G > 3) {
      load_keys(3, d);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, scores, score_stride);
  if constexpr (G > 1) _tile_stored(1, scores + kGroup, score_stride);
  if constexpr (G > 2) _tile_stored(2, scores + 2 * kGroup, score_stride);
  if constexpr (G > 3) _tile_stored(3, scores + 3 * kGroup, score_stride);
}

// out[rows][16 x S dimensions from d] += weights . values: values [8 slot pairs][dim][2] likewise.
template <int S>
void add_values(const bf16* weights, const KeyTile<bf16>& tile, int head_dim, int d, bool fetches, float* out) {
  const long out_stride = head_dim * long(sizeof(float)), weight_stride = kTileKeys * long(sizeof(bf16));
  _tile_loadd(0, out + d, out_stride);
  if constexpr (S > 1) _tile_loadd(1, out + d + 16, out_stride);
  if constexpr (S > 2) _tile_loadd(2, out + d + 32, out_stride);
  if constexpr (S > 3) _tile_loadd(3, out + d + 48, out_stride);
  for (int g = 0; g < tile.num_groups; ++g) {
    const auto load_values = [&](int s) {
      if (fetches) prefetch(tile.next_values[g] + (d + 16 * s) * kGroup, 8);
      _tile_loadd(7, tile.values[g] + 2 * (d + 16 * s), head_dim * 2 * long(sizeof(bf16)));
    };
    _tile_loadd(6, weights + g * kGroup, weight_stride);
    load_values(0);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (S > 1) {
      load_values(1);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (S > 2) {
      load_values(2);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (S > 3) {
      load_values(3);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  _tile_stored(0, out + d, out_stride);
  if constexpr (S > 1) _tile_stored(1, out + d + 16, out_stride);
  if constexpr (S > 2) _tile_stored(2, out + d + 32, out_stride);
  if constexpr (S > 3) _tile_stored(3, out + d + 48, out_stride);
}

void score_tile(const bf16* q, int head_dim, const KeyTile<bf16>& tile, bool fetches, float* scores) {
  switch (tile.num_groups) {
    case 1: return score_groups<1>(q, head_dim, tile, fetches, scores);
    case 2: return score_groups<2>(q, head_dim, tile, fetches, scores);
    case 3: return score_groups<3>(q, head_dim, tile, fetches, scores);
    case 4: return score_groups<4>(q, head_dim, tile, fetches, scores);
  }
}

void add_tile_values(const bf16* weights, const KeyTile<bf16>& tile, int head_dim, bool fetches, float* out) {
  int d = 0;
  for (; d + 16 * kSums <= head_dim; d += 16 * kSums) add_values<kSums>(weights, tile, head_dim, d, fetches, out);
  for (; d < head_dim; d += 16) add_values<1>(weights, tile, head_dim, d, fetches, out);
}

void scale_row(float* row, int head_dim, float factor) {
  for (int d = 0; d < head_dim; d += 16)
    _mm512_storeu_ps(row + d, _mm512_mul_ps(_mm512_loadu_ps(row + d), _mm512_set1_ps(factor)));
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
  float* weight_sums = maximum + padded_rows;                                            // [rows][16]
  // A single tile has the rows there are, several have 16 each.
  const int tile_rows = row_tiles == 1 ? rows : kTileRows, used_rows = row_tiles * tile_rows;
  std::fill(sums, sums + size_t(used_rows) * head_dim, 0.0f);
  std::fill(q + size_t(rows) * head_dim, q + size_t(used_rows) * head_dim, bf16(0));
  std::fill(weights + size_t(rows) * kTileKeys, weights + size_t(used_rows) * kTileKeys, bf16(0));
  for (int r = 0; r < rows; ++r) {
    const bf16* from = item.q + r / shared * item.q_stride + size_t(item.kv_head * shared + r % shared) * head_dim;
    std::copy(from, from + head_dim, q + size_t(r) * head_dim);
    maximum[r] = -std::numeric_limits<float>::infinity();
  }
  std::fill(weight_sums, weight_sums + size_t(rows) * kGroup, 0.0f);

  _tile_loadconfig(&kConfigurations.of_rows[tile_rows]);
  before_tile_loads();
  walk_tiles(shape, item, following, [&](const KeyTile<bf16>& tile) {
    for (int t = 0; t < row_tiles; ++t) {
      const size_t row = size_t(t) * kTileRows;
      score_tile(q + row * head_dim, head_dim, tile, t == 0, scores + row * kTileKeys);
    }
    for (int r = 0; r < rows; ++r) {
      const float decay = soften(shape, scores + size_t(r) * kTileKeys, tile.first_key, item.first_position + r / shared,
                                 maximum[r], weight_sums + size_t(r) * kGroup, weights + size_t(r) * kTileKeys);
      if (decay != 1.0f) scale_row(sums + size_t(r) * head_dim, head_dim, decay);
    }
    before_tile_loads();
    for (int t = 0; t < row_tiles; ++t) {
      const size_t row = size_t(t) * kTileRows;
      add_tile_values(weights + row * kTileKeys, tile, head_dim, t == 0, sums + row * head_dim);
    }
  });
  _tile_loadconfig(&kProducts);
  finish_rows(shape, item, sums, weight_sums, out, first_row);
}

}  // namespace noria
