// What this machine can do at this moment: rates and times that a benchmark reports beside its own result, because
// machines change (clocks, neighbours, where a virtual machine's cores are). Nothing here is used by the executor.
#pragma once

#include <cstddef>

#include "gemm.h"

namespace noria {

// Bytes per second that all threads together read from a buffer of that many bytes, each thread its own part: the median
// of some passes. The buffer should be far larger than the caches.
double read_bandwidth(int num_threads, size_t num_bytes);

// Seconds for a cache line to go to another core and back, between threads pinned to the first and the last core that
// this process may use: the median of some hundred round trips at a time. 0 where there is only one core, or where
// threads cannot be pinned.
double round_trip_seconds();

// Operations per second (a multiplication and an addition are two) of the executor's micro kernel on all threads, on
// inputs that stay in the first caches: the best of some passes.
template <typename T>
double kernel_flops(int num_threads, GemmKernel<T> kernel);

// Likewise of the bare AVX-512 instruction on registers: for T = bf16 the product of pairs, for float the fused
// multiply-add. No AVX-512 kernel can be faster.
template <typename T>
double register_flops(int num_threads);

}  // namespace noria
