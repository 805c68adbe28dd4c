#include "threads.h"

#include <immintrin.h>

namespace noria {

namespace {

constexpr int kSpinsBeforeYield = 2000;    // at a barrier: tens of microseconds
constexpr int kSpinsBeforeSleep = 20000;   // between steps: a fraction of a millisecond

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (num_threads_ == 1) {
    task(0);
    return;
  }
  task_ = &task;
  {
    // Under the lock, so that nobody falls asleep between looking at the generation and waiting for it.
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  if (num_asleep_.load() > 0) wake_.notify_all();
  task(0);
  barrier();
}

void ThreadPool::work(int thread) {
  unsigned seen = 0;
  while (true) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpinsBeforeSleep) {
        _mm_pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      num_asleep_.fetch_sub(1);
    }
    ++seen;
    if (stop_.load()) return;
    (*task_)(thread);
    barrier();
  }
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const unsigned phase = phase_.load(std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (phase_.load(std::memory_order_acquire) == phase) {
    if (++spins < kSpinsBeforeYield) {
      _mm_pause();
    } else {
      std::this_thread::yield();  // somebody else wants this core, perhaps the thread we wait for
    }
  }
}

}  // namespace noria
