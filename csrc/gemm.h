// Matrix products with prepacked weights: y[m, n] = sum over k of x[m, k] * w[n, k].
//
// Weights are packed in panels of 32 outputs, activations in slabs of 32 inputs:
//
//   bfloat16   weights     [N/32][K/2][32 outputs][2 inputs]    activations  [K/32][M][32 inputs]
//   float32    weights     [N/32][K][32 outputs]                activations  [K/32][M][32 inputs]
//
// K and N are padded with zeros to multiples of 32. A kernel computes some rows of one panel into a small float32
// block [rows][32]; what becomes of the block (bias, residual, activation) is the caller's business.
//
// Every output has one accumulator and takes its inputs in order, whatever the number of rows: the result for a row
// does not depend on its neighbours. The AMX and the AVX-512 kernels add up in different orders, so one of them is
// chosen for a whole process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace noria {

using bf16 = uint16_t;

constexpr int kPanel = 32;  // outputs in a panel
constexpr int kSlab = 32;   // inputs in a slab

inline size_t padded(size_t n) { return (n + 31) / 32 * 32; }

// A place in a product's input.
template <typename T>
struct SlabsView {
  T* data;
  size_t stride;  // elements between slabs
  T* at(size_t row, size_t column) const { return data + column / kSlab * stride + row * kSlab + column % kSlab; }
};

// Memory to ask for while a block is computed: `step` bytes for every `kBytes` of a panel, so that weights arrive evenly
// while the multipliers work. It may lie outside of any array.
struct Ahead {
  static constexpr size_t kBytes = 128;
  uintptr_t at;
  size_t step;

  // The panel's own weights, a little ahead of their use: there is only one block of rows. Otherwise a share of what comes
  // after the panel, or the part of it that is at hand.
  bool is_near() const { return step == kBytes; }

  // For the next `kBytes` x `times` of the panel. Into the first cache, or the second.
  template <bool kSecond = false>
  void fetch(int times = 1);
};

// Work on rows of some other block, to be done while this one is computed: where multiplying is the tiles' business, the
// vector units have nothing else to do.
struct Meanwhile {
  void (*run)(const void* what, int begin, int end) = nullptr;
  const void* what = nullptr;
  int rows = 0;
};

// block[r * kPanel + j] for r in [0, rows), rows <= max_rows (up to the next multiple of `row_multiple` they are written), over some slabs: from 0, or on from what the block holds.
// `x` points to the first row in the first slab; slabs are `slab_stride` elements apart. Rows up to the next multiple of
// `row_multiple` are read, and must exist.
template <typename T>
struct GemmKernel {
  int max_rows;
  int row_multiple;
  int most_slabs;  // of several blocks of rows in turn: what the first cache holds of a panel
  size_t ahead_bytes;  // of a single one: how far ahead of their use weights are asked for
  void (*run)(const T* x, size_t slab_stride, int rows, const T* panel, int num_slabs, float* block, bool goes_on,
              Ahead ahead, Meanwhile meanwhile);
  void (*enter)();  // per thread, before and
  void (*leave)();  // after a step
  const char* name;
  bool has_tiles;
};

enum class Isa { kAvx512, kAmx };

bool cpu_has_avx512_bf16();
bool cpu_has_amx_bf16();  // asks the system for permission as well

GemmKernel<bf16> bf16_kernel(Isa isa);
GemmKernel<float> float_kernel();
GemmKernel<bf16> amx_kernel();  // gemm_amx.cpp

}  // namespace noria
