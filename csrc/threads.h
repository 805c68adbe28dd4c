// A pool of threads for one step at a time: all of them run the same function, meet at barriers, and share work by
// counters. Between steps they spin for a short while and then sleep, so that an idle engine costs nothing and other
// processes get the cores.
#pragma once

#include <atomic>
#include <condition_variable>
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

  // Runs task(thread) on every thread, the caller being thread 0, and returns when all have.
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

}  // namespace noria
