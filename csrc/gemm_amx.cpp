// The AMX kernel: up to 32 rows x 32 outputs in four tiles of accumulators.
#include <immintrin.h>

#include "numbers.h"
#include "tiles.h"
#ifdef NORIA_EMULATE_AMX
#include "tiles_emulated.h"
#endif

namespace noria {

namespace {

const TileConfig kConfig = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void enter() { _tile_loadconfig(&kConfig); }

void leave() { _tile_release(); }

constexpr int kFetches = kSlab * kPanel * int(sizeof(bf16)) / int(Ahead::kBytes);  // to a slab of a panel

// Tiles 0-3 accumulate, 4 and 5 hold activations, 6 and 7 weights. A slab of a panel is 16 pairs of inputs x 32 outputs.
void run(const bf16* x, size_t slab_stride, int rows, const bf16* panel, int num_slabs, float* block, Ahead ahead) {
  constexpr int kStride = kPanel * 2 * sizeof(bf16);
  if (rows <= 16) {
    _tile_zero(0);
    _tile_zero(1);
    for (int slab = 0; slab < num_slabs; ++slab, x += slab_stride, panel += kSlab * kPanel) {
      ahead.fetch(kFetches);
      _tile_loadd(4, x, 64);
      _tile_loadd(6, panel, kStride);
      _tile_loadd(7, panel + kPanel, kStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, block, kPanel * sizeof(float));
    _tile_stored(1, block + 16, kPanel * sizeof(float));
    return;
  }
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int slab = 0; slab < num_slabs; ++slab, x += slab_stride, panel += kSlab * kPanel) {
    ahead.fetch(kFetches);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, panel, kStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPanel, kStride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + 16 * kSlab, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, block, kPanel * sizeof(float));
  _tile_stored(1, block + 16, kPanel * sizeof(float));
  _tile_stored(2, block + 16 * kPanel, kPanel * sizeof(float));
  _tile_stored(3, block + 16 * kPanel + 16, kPanel * sizeof(float));
}

}  // namespace

GemmKernel<bf16> amx_kernel() { return {32, 16, run, enter, leave, "amx-bf16", true}; }

}  // namespace noria
