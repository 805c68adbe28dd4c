// AMX's tile instructions in plain C++, for machines that have none: with NORIA_EMULATE_AMX defined, the AMX kernels are
// compiled against these. For checks only (`make sanitize`): slow, and here a sanitizer sees every access, which it does
// not with the instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "tiles.h"

namespace noria::emulated {

struct Tile {
  alignas(64) uint8_t row[16][64];
};

inline thread_local TileConfig config;
inline thread_local Tile tiles[8];

inline void load_config(const void* from) { std::memcpy(&config, from, sizeof config); }

inline void release() { config = TileConfig{}; }

inline void zero(int tile) { tiles[tile] = Tile{}; }

inline void load(int tile, const void* from, long stride) {
  zero(tile);
  for (int r = 0; r < config.rows[tile]; ++r)
    std::memcpy(tiles[tile].row[r], static_cast<const uint8_t*>(from) + r * stride, config.bytes_per_row[tile]);
}

inline void store(int tile, void* to, long stride) {
  for (int r = 0; r < config.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles[tile].row[r], config.bytes_per_row[tile]);
}

// sums[m][n] += a[m][pair k] . b[k][pair n]
inline void add_products(int sums, int a, int b) {
  for (int m = 0; m < config.rows[sums]; ++m)
    for (int k = 0; k < config.bytes_per_row[a] / 4; ++k)
      for (int n = 0; n < config.bytes_per_row[sums] / 4; ++n) {
        bf16 left[2], right[2];
        float sum;
        std::memcpy(left, tiles[a].row[m] + 4 * k, 4);
        std::memcpy(right, tiles[b].row[k] + 4 * n, 4);
        std::memcpy(&sum, tiles[sums].row[m] + 4 * n, 4);
        sum += to_float(left[0]) * to_float(right[0]) + to_float(left[1]) * to_float(right[1]);
        std::memcpy(tiles[sums].row[m] + 4 * n, &sum, 4);
      }
}

}  // namespace noria::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig noria::emulated::load_config
#define _tile_release noria::emulated::release
#define _tile_zero noria::emulated::zero
#define _tile_stream_loadd noria::emulated::load
#define _tile_loadd noria::emulated::load
#define _tile_stored noria::emulated::store
#define _tile_dpbf16ps noria::emulated::add_products
