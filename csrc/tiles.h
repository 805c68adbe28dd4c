// The layout of AMX's tile configuration.
#pragma once

#include <cstdint>

namespace noria {

// Make them static constants: the compiler believes that the loading instruction reads no more than eight bytes.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// What was stored before this is what tile loads after it read: to the compiler they read no memory.
inline void before_tile_loads() { __asm__ volatile("" ::: "memory"); }

}  // namespace noria
