#include "gemm.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

namespace noria {

namespace {

constexpr int kRows = 14;  // 14 rows x 2 registers of accumulators, 2 of weights, 1 of activations: 31 of 32

template <typename T, int R>
void one_block(const T* x, size_t slab_stride, const T* panel, int num_slabs, float* block, bool goes_on,
               Ahead ahead) {
  using L = Lanes<T>;
  __m512 low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int r = 0; goes_on && r < R; ++r) {
    low[r] = _mm512_loadu_ps(block + r * kPanel);
    high[r] = _mm512_loadu_ps(block + r * kPanel + 16);
  }
  for (int slab = 0; slab < num_slabs; ++slab, x += slab_stride) {
    for (int k = 0; k < kSlab; k += L::kDepth, panel += kPanel * L::kDepth) {
      ahead.fetch();
      const auto w0 = L::load(panel), w1 = L::load(panel + kPanel / 2 * L::kDepth);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const auto a = L::spread(x + r * kSlab + k);
        low[r] = L::add_product(low[r], a, w0);
        high[r] = L::add_product(high[r], a, w1);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(block + r * kPanel, low[r]);
    _mm512_storeu_ps(block + r * kPanel + 16, high[r]);
  }
}

template <typename T>
void run_rows(const T* x, size_t slab_stride, int rows, const T* panel, int num_slabs, float* block, bool goes_on,
              Ahead ahead, Meanwhile) {
  switch (rows) {
#define NORIA_ROWS(R) \
  case R: return one_block<T, R>(x, slab_stride, panel, num_slabs, block, goes_on, ahead);
    NORIA_ROWS(1) NORIA_ROWS(2) NORIA_ROWS(3) NORIA_ROWS(4) NORIA_ROWS(5) NORIA_ROWS(6) NORIA_ROWS(7)
    NORIA_ROWS(8) NORIA_ROWS(9) NORIA_ROWS(10) NORIA_ROWS(11) NORIA_ROWS(12) NORIA_ROWS(13) NORIA_ROWS(14)
#undef NORIA_ROWS
  }
}

void nothing() {}

constexpr int kWholePanel = 1 << 30;
constexpr size_t kAheadBytes = 4096;

}  // namespace

bool cpu_has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

bool cpu_has_amx_bf16() {
#ifdef NORIA_EMULATE_AMX
  return true;
#else
  unsigned a, b, c, d = 0;
  __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool has_bf16 = d >> 22 & 1, has_tiles = d >> 24 & 1;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return has_bf16 && has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

GemmKernel<bf16> bf16_kernel(Isa isa) {
  if (isa == Isa::kAmx) return amx_kernel();
  return {kRows, 1, kWholePanel, kAheadBytes, run_rows<bf16>, nothing, nothing, "avx512-bf16", false};
}

GemmKernel<float> float_kernel() { return {kRows, 1, kWholePanel, kAheadBytes, run_rows<float>, nothing, nothing, "avx512-float32", false}; }

}  // namespace noria
