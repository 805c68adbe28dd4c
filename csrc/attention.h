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
// With a window, groups that none of an item's queries sees are not read: their blocks may be somebody else's by then.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gemm.h"

namespace noria {

constexpr int kGroup = 16;       // slots in a group
constexpr int kTileGroups = 4;   // groups in a tile of keys
constexpr int kTileKeys = kGroup * kTileGroups;
constexpr int kMaxHeadDim = 256;
constexpr int kNoWindow = 1 << 30;  // more keys than there are, and no overflow where it is subtracted from positions

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;  // a multiple of 16
  float scale;
  int window = kNoWindow;  // how many keys a query sees, its own the last of them
  float soft_cap = 0;   // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  int rotary_dim = 0;   // the first dimensions of a head, which are rotated where there is a table

  int shared() const { return num_heads / num_kv_heads; }  // query heads to one of keys and values
  int width() const { return num_heads * head_dim; }
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

  // Its queries see groups from here on
  int first_group(const AttentionShape& shape) const { return std::max(first_position + 1 - shape.window, 0) / kGroup; }
  int num_groups() const { return (first_position + num_queries - 1) / kGroup + 1; }  // to here.
  // Keys of a group; values follow.
  const T* keys(const AttentionShape& shape, int group) const {
    const size_t index = size_t(blocks[group / groups_per_block]) * groups_per_block + group % groups_per_block;
    return pool + index * shape.group_elements() + 2 * kv_head * shape.part_elements();
  }
};

// What is read together: up to four groups of keys and their values.
template <typename T>
struct KeyTile {
  int first_key, num_groups;
  const T* keys[kTileGroups];
  const T* values[kTileGroups];
  // Where the groups of the tile after this one lie, or these where there are none: memory to ask for meanwhile.
  const T* next_keys[kTileGroups];
  const T* next_values[kTileGroups];
};

// Calls visit(tile) for an item's tiles in order; `following` is what this thread will probably do afterwards, or null.
template <typename T, typename Visit>
void walk_tiles(const AttentionShape& shape, const AttentionItem<T>& item, const AttentionItem<T>* following, Visit visit) {
  const auto first_tile = [](int group) { return group / kTileGroups * kTileGroups; };
  const int num_groups = item.num_groups(), first_group = item.first_group(shape);
  const int following_group = following == nullptr ? 0 : following->first_group(shape);
  KeyTile<T> tile;
  for (int first = first_tile(first_group); first < num_groups; first += kTileGroups) {
    tile.first_key = first * kGroup;
    tile.num_groups = std::min(kTileGroups, num_groups - first);
    const bool is_last = first + kTileGroups >= num_groups;
    const AttentionItem<T>* owner = is_last ? following : &item;
    const int next_first = is_last ? first_tile(following_group) : first + kTileGroups;
    const int next_seen = is_last ? following_group : first_group;
    for (int g = 0; g < tile.num_groups; ++g) {
      // Instead of a group before the window the first one in it is read: those keys are hidden anyway.
      tile.keys[g] = item.keys(shape, std::max(first + g, first_group));
      tile.values[g] = tile.keys[g] + shape.part_elements();
      const bool has_next = owner != nullptr && next_first + g < owner->num_groups();
      tile.next_keys[g] = has_next ? owner->keys(shape, std::max(next_first + g, next_seen)) : tile.keys[g];
      tile.next_values[g] = tile.next_keys[g] + shape.part_elements();
    }
    visit(tile);
  }
}

// The heads that share the item's kv_head, for its queries: out at (first_row + query, head * head_dim + d), `width` wide,
// with zeros up to the end of a slab. `following` may be null.
template <typename T>
void attend(const AttentionShape& shape, const AttentionItem<T>& item, const AttentionItem<T>* following, float* scratch,
            SlabsView<T> out, int first_row);

// The same on AMX tiles, for bfloat16 and head_dim a multiple of 32; sums are formed in another order. Between `enter`
// and `leave` of the thread; leaves the tiles configured for matrix products.
void attend_amx(const AttentionShape& shape, const AttentionItem<bf16>& item, const AttentionItem<bf16>* following,
                float* scratch, SlabsView<bf16> out, int first_row);

// The last step of both: sums [rows][head_dim] divided by the row's sum of weights, which is in 16 parts, into `out`.
template <typename T>
void finish_rows(const AttentionShape& shape, const AttentionItem<T>& item, const float* sums, const float* weight_sums,
                 SlabsView<T> out, int first_row);

// Turns a row's scores of one tile (which it may overwrite) into weights, hiding keys that the query at `position` does not see; updates the running
// maximum (of scores) and the 16 sums (of weights, every 16th key's). Returns by what everything before is to be multiplied:
// mostly exactly 1.
template <typename T>
float soften(const AttentionShape& shape, float* scores, int first_key, int position, float& maximum, float* sums,
             T* weights);

// Numbers of scratch that `attend` and `attend_amx` need for that many queries.
size_t attention_scratch_floats(const AttentionShape& shape, int num_queries);

// Writes one token's keys and values (float32 [num_kv_heads * head_dim], keys rotated already) into a slot. Values are
// made finite: what stands in a group behind a row's last key is read and multiplied by zero, whoever left it there.
template <typename T>
void write_kv(const AttentionShape& shape, T* pool, int64_t slot, const float* k, const float* v);

}  // namespace noria
