// The AMX kernel: up to 32 rows x 32 outputs in four tiles of accumulators.
#include <immintrin.h>

#include <algorithm>

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

// Shares out the rows of what is to be done meanwhile over the slabs.
class Sharing {
 public:
  Sharing(const Meanwhile& meanwhile, int num_slabs) : work_(meanwhile), step_((meanwhile.rows + num_slabs - 1) / num_slabs) {}
  void next() {
    if (done_ == work_.rows) return;
    const int begin = done_;
    done_ = std::min(begin + step_, work_.rows);
    work_.run(work_.what, begin, done_);
  }

 private:
  const Meanwhile work_;
  const int step_;
  int done_ = 0;
};

// Ahead::fetch for a single block, spread between the loads.
template <int kLines>
inline void fetch_lines(Ahead& ahead) {
  const char* lines = reinterpret_cast<const char*>(ahead.at);
#pragma GCC unroll 32
  for (int i = 0; i < kLines; ++i) _mm_prefetch(lines + 64 * i, _MM_HINT_T0);
  ahead.at += kLines * 64;
}

constexpr long kStride = kPanel * 2 * sizeof(bf16), kBlockStride = kPanel * sizeof(float);

// Tiles 0-3 accumulate, 4 and 5 hold activations, 6 and 7 weights. A slab of a panel is 16 pairs of inputs x 32 outputs.
// A single block of rows keeps its activations in the first cache, and weights pass through. With several it is the other
// way round: a part of a panel stays for the next block, activations are loaded past it, and what comes next is asked for
// into the second cache.
template <bool kTwo, bool kManyBlocks>  // kTwo: 17 to 32 rows, else up to 16
void run_tiles(const bf16* x, size_t slab_stride, const bf16* panel, int num_slabs, float* block, bool goes_on, Ahead ahead,
               Sharing sharing) {
  float* second = block + 16 * kPanel;  // its rows from 16 on
  if (goes_on) {
    _tile_stream_loadd(0, block, kBlockStride);
    _tile_stream_loadd(1, block + 16, kBlockStride);
    if constexpr (kTwo) {
      _tile_stream_loadd(2, second, kBlockStride);
      _tile_stream_loadd(3, second + 16, kBlockStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int slab = 0; slab < num_slabs; ++slab, x += slab_stride, panel += kSlab * kPanel) {
    if constexpr (kManyBlocks) {
      ahead.fetch<true>(kFetches);
      _tile_stream_loadd(4, x, 64);
      _tile_loadd(6, panel, kStride);
      _tile_loadd(7, panel + kPanel, kStride);
      if constexpr (kTwo) _tile_stream_loadd(5, x + 16 * kSlab, 64);
    } else {
      fetch_lines<8>(ahead);
      _tile_loadd(4, x, 64);
      fetch_lines<8>(ahead);
      _tile_loadd(6, panel, kStride);
      fetch_lines<8>(ahead);
      _tile_loadd(7, panel + kPanel, kStride);
      fetch_lines<8>(ahead);
      if constexpr (kTwo) _tile_loadd(5, x + 16 * kSlab, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    sharing.next();
  }
  _tile_stored(0, block, kBlockStride);
  _tile_stored(1, block + 16, kBlockStride);
  if constexpr (kTwo) {
    _tile_stored(2, second, kBlockStride);
    _tile_stored(3, second + 16, kBlockStride);
  }
}

void run(const bf16* x, size_t slab_stride, int rows, const bf16* panel, int num_slabs, float* block, bool goes_on,
         Ahead ahead, Meanwhile meanwhile) {
  const Sharing sharing(meanwhile, num_slabs);
  const auto run_rows = rows <= 16 ? (ahead.is_near() ? run_tiles<false, false> : run_tiles<false, true>)
                                   : (ahead.is_near() ? run_tiles<true, false> : run_tiles<true, true>);
  run_rows(x, slab_stride, panel, num_slabs, block, goes_on, ahead, sharing);
}

constexpr int kMostSlabs = 18;  // 36 of 48 KiB
constexpr size_t kAheadBytes = 2048;

}  // namespace

GemmKernel<bf16> amx_kernel() { return {32, 16, kMostSlabs, kAheadBytes, run, enter, leave, "amx-bf16", true}; }

}  // namespace noria
