// Paged attention over a KV pool laid out for the registers that read it.
//
// A layer's pool is one array, in groups of 16 slots (a block is one or more groups), so that what is read together lies
// together: [group][kv_head][keys, then values], with
//
//   bfloat16   keys [dim/2][16 slots][2 dims]     values [8 slot pairs][dim][2 slots]
//   float32    keys [dim][16 slots]               values [16 slots][dim]
//
// Keys are taken in tiles of 64 at absolute positions; a tile that a query does not see changes nothing. So a query's
// result depends on its own position and its row's keys, not on how the row is cut into chunks or where its blocks are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm.h"

namespace noria {

constexpr int kGroup = 16;       // slots in a group
constexpr int kTileGroups = 4;   // groups in a tile of keys
constexpr int kTileKeys = kGroup * kTileGroups;
constexpr int kMaxHeadDim = 256;

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;  // a multiple of 16
  float scale;

  int shared() const { return num_heads / num_kv_heads; }
  size_t part_elements() const { return size_t(head_dim) * kGroup; }  // one head's keys, or values, in a group
  size_t group_elements() const { return 2 * num_kv_heads * part_elements(); }
};

// Some queries of one row, all heads that share one key/value head.
template <typename T>
struct AttentionItem {
  const T* q;             // [queries][num_heads * head_dim], of the row's first query
  size_t q_stride;        // elements between queries
  int num_queries;
  int first_position;     // of the first query; the others follow
  const int32_t* blocks;  // the row's block table
  int groups_per_block;
  const T* pool;          // the layer's
  int kv_head;
};


// result[query * result_stride + head * head_dim + d], float32, for the heads that share the item's kv_head.
template <typename T>
void attend(const AttentionShape& shape, const AttentionItem<T>& item, float* scratch, float* result,
            size_t result_stride);

// The same on AMX tiles, for bfloat16 and head_dim a multiple of 32; sums are formed in another order. Between `enter`
// and `leave` of the thread; leaves the tiles configured for matrix products.
void attend_amx(const AttentionShape& shape, const AttentionItem<bf16>& item, float* scratch, float* result,
                size_t result_stride);

// Turns a row's scores of one tile into weights, hiding keys behind `position`; updates the running maximum and sum.
// Returns by what everything before is to be multiplied.
template <typename T>
float soften(const float* scores, int first_key, int position, float& maximum, float& sum, T* weights);

// Bytes / 4 that `attend` needs of scratch for that many queries.
size_t attention_scratch_floats(const AttentionShape& shape, int num_queries);

// Writes one token's keys and values (float32 [num_kv_heads * head_dim], keys rotated already) into a slot. Values are
// made finite: what stands in a group behind a row's last key is read and multiplied by zero, whoever left it there.
template <typename T>
void write_kv(const AttentionShape& shape, T* pool, int64_t slot, const float* k, const float* v);

}  // namespace noria
