#include "machine.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "threads.h"

namespace noria {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Seconds for each of some passes of `task` on all threads.
template <typename Task>
std::vector<double> time_passes(ThreadPool& pool, int num_passes, Task task) {
  std::vector<double> seconds;
  pool.run(task);  // wakes the threads, and the clocks
  for (int pass = 0; pass < num_passes; ++pass) {
    const auto begin = Clock::now();
    pool.run(task);
    seconds.push_back(seconds_since(begin));
  }
  return seconds;
}

// Keeps the compiler from leaving out what computed x.
inline void keep(__m512& x) { __asm__ volatile("" : "+v"(x)); }

constexpr size_t kLine = 64;

void read_lines(const char* from, size_t num_bytes) {
  __m512i all[8];
  for (__m512i& some : all) some = _mm512_setzero_si512();
  for (size_t at = 0; at + sizeof(all) <= num_bytes; at += sizeof(all))
    for (int i = 0; i < 8; ++i) all[i] = _mm512_or_si512(all[i], _mm512_load_si512(from + at + kLine * i));
  for (__m512i& some : all) __asm__ volatile("" : "+v"(some));
}

bool pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  return pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores) == 0;
}

}  // namespace

double read_bandwidth(int num_threads, size_t num_bytes) {
  constexpr int kPasses = 9;
  ThreadPool pool(num_threads);
  const size_t share = num_bytes / num_threads / 4096 * 4096;
  Array<char> buffer(share * num_threads);
  // Pages that were never written are all the same one, which the caches hold.
  pool.run([&](int thread) { std::fill_n(buffer.data() + share * thread, share, char(1)); });
  const auto seconds = time_passes(pool, kPasses, [&](int thread) { read_lines(buffer.data() + share * thread, share); });
  return double(share * num_threads) / median(seconds);
}

double round_trip_seconds() {
  constexpr int kTripsAtATime = 200, kMostTimes = 200;
  constexpr double kLongest = 0.2;  // on a busy machine a single trip may wait for somebody's time slice
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return 0;
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);

  alignas(kLine) std::atomic<int> ball{0};  // even: here, odd: there, negative: the game is over
  std::atomic<int> num_unpinned{0};
  std::vector<double> seconds;
  std::thread there([&] {
    if (!pin(cores.back())) num_unpinned.fetch_add(1);
    for (int seen; (seen = ball.load(std::memory_order_acquire)) >= 0;)
      if (seen % 2) ball.store(seen + 1, std::memory_order_release);
  });
  std::thread here([&] {  // a thread of its own, so that the caller stays where it was
    if (!pin(cores.front())) num_unpinned.fetch_add(1);
    const auto begin = Clock::now();
    for (int time = 0, next = 0; time < kMostTimes && seconds_since(begin) < kLongest; ++time) {
      const auto served = Clock::now();
      for (int trip = 0; trip < kTripsAtATime; ++trip, next += 2) {
        ball.store(next + 1, std::memory_order_release);
        while (ball.load(std::memory_order_acquire) != next + 2) {
        }
      }
      seconds.push_back(seconds_since(served) / kTripsAtATime);
    }
    ball.store(-1, std::memory_order_release);
  });
  here.join();
  there.join();
  return num_unpinned.load() ? 0 : median(seconds);
}

template <typename T>
double kernel_flops(int num_threads, GemmKernel<T> kernel) {
  constexpr int kPasses = 30, kCalls = 400, kSlabs = 8;  // x and the panel together are a third of a first-level cache
  ThreadPool pool(num_threads);
  const int rows = kernel.max_rows;
  std::vector<Array<T>> inputs, panels;
  std::vector<Array<float>> blocks;
  for (int thread = 0; thread < num_threads; ++thread) {
    inputs.emplace_back(size_t(kSlabs) * rows * kSlab);
    panels.emplace_back(size_t(kSlabs) * kSlab * kPanel);
    blocks.emplace_back(size_t(rows) * kPanel);
    std::fill_n(inputs.back().data(), inputs.back().size(), from_float<T>(0.3f));
    std::fill_n(panels.back().data(), panels.back().size(), from_float<T>(0.7f));
  }
  const auto seconds = time_passes(pool, kPasses, [&](int thread) {
    kernel.enter();
    const T* panel = panels[thread].data();
    const Ahead ahead{reinterpret_cast<uintptr_t>(panel), Ahead::kBytes};
    for (int call = 0; call < kCalls; ++call)
      kernel.run(inputs[thread].data(), size_t(rows) * kSlab, rows, panel, kSlabs, blocks[thread].data(), false, ahead, {});
    kernel.leave();
  });
  const double operations = 2.0 * num_threads * kCalls * rows * kPanel * kSlabs * kSlab;
  return operations / *std::min_element(seconds.begin(), seconds.end());
}

template <typename T>
double register_flops(int num_threads) {
  constexpr int kPasses = 30, kRounds = 20000, kRegisters = 28;
  ThreadPool pool(num_threads);
  const auto seconds = time_passes(pool, kPasses, [](int) {
    __m512 sums[kRegisters];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    // For bfloat16 these are pairs of some number: which one does not matter to the time.
    __m512 a = _mm512_set1_ps(0.3f), b = _mm512_set1_ps(0.7f);
    for (int round = 0; round < kRounds; ++round) {
      keep(a);  // or the compiler would find that every round adds the same
#pragma GCC unroll 28
      for (int i = 0; i < kRegisters; ++i) {
        if constexpr (sizeof(T) == 2) {
          sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
        } else {
          sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
        }
      }
    }
    for (__m512& sum : sums) keep(sum);
  });
  const double operations = 2.0 * num_threads * kRounds * kRegisters * 16 * (sizeof(T) == 2 ? 2 : 1);
  return operations / *std::min_element(seconds.begin(), seconds.end());
}

template double kernel_flops<bf16>(int, GemmKernel<bf16>);
template double kernel_flops<float>(int, GemmKernel<float>);
template double register_flops<bf16>(int);
template double register_flops<float>(int);

}  // namespace noria
