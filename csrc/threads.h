// A pool of threads for one step at a time: all of them run the same function, meet at barriers, and share out work.
// Between steps they spin for a short while and then sleep, so that an idle engine costs nothing and other processes get
// the cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace noria {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Runs task(thread) on every thread, the caller being thread 0, and returns when all have. A task must not throw: the
  // others would wait for it for ever. What it needs is allocated before.
  void run(const std::function<void(int)>& task);

  // Called by every thread of a running task: returns once all have called it.
  void barrier();

 private:
  void work(int thread);

  const int num_threads_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* task_ = nullptr;
  std::atomic<unsigned> generation_{0};  // counts tasks
  std::atomic<int> num_arrived_{0};
  std::atomic<unsigned> phase_{0};  // counts barriers
  std::atomic<bool> stop_{false};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Shares out numbered pieces of work. Every thread has an equal, contiguous part of its own, the same one in every round
// with as many pieces, so what it wrote in one round is in its cache in the next; done with it, it helps others with theirs.
//
// A round is between two barriers. There are two sets of counters by turns: while one is in use, each thread clears its
// own of the other.
class Shares {
 public:
  explicit Shares(int num_threads) : num_threads_(num_threads), counters_(2 * num_threads) {}

  // Before the first round, by one thread.
  void clear() {
    for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
  }

  // Called by every thread in every round: calls turn(begin, end), at most `per_turn` pieces at a time, until all `total`
  // are taken.
  template <typename Turn>
  void run(int thread, unsigned round, int total, int per_turn, Turn turn) {
    Counter* counters = &counters_[round % 2 * num_threads_];
    counters_[(round + 1) % 2 * num_threads_ + thread].next.store(0, std::memory_order_relaxed);
    for (int i = 0; i < std::min(num_threads_, kMostOwners); ++i) {
      const int owner = (thread + i) % num_threads_;
      const int first = int(int64_t(total) * owner / num_threads_), size = int(int64_t(total) * (owner + 1) / num_threads_) - first;
      for (int begin; (begin = counters[owner].next.fetch_add(per_turn, std::memory_order_relaxed)) < size;)
        turn(first + begin, first + std::min(begin + per_turn, size));
    }
  }

 private:
  static constexpr int kMostOwners = 8;  // with many threads, looking at everybody's counter would cost more than it finds
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };

  const int num_threads_;
  std::vector<Counter> counters_;
};

}  // namespace noria
