// Large arrays: aligned, lazily committed and zero at first, on huge pages where the system has them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace noria {

template <typename T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t size) : size_(size) {
    if (size == 0) return;
    bytes_ = (size * sizeof(T) + kSlack + kHuge - 1) / kHuge * kHuge;
    // One huge page more than needed, to begin at a multiple of one.
    void* mapped = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    base_ = mapped;
    const size_t address = (reinterpret_cast<size_t>(mapped) + kHuge - 1) / kHuge * kHuge;
    data_ = reinterpret_cast<T*>(address);
    madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  ~Array() {
    if (base_ != nullptr) munmap(base_, bytes_ + kHuge);
  }
  Array(Array&& other) noexcept { swap(other); }
  Array& operator=(Array&& other) noexcept {
    swap(other);
    return *this;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }

  // Keeps at least `size` elements; what was there is lost when it grows.
  void reserve(size_t size) {
    if (size > size_) *this = Array(size + size / 4);
  }

 private:
  static constexpr size_t kHuge = size_t(2) << 20;
  static constexpr size_t kSlack = 4096;  // kernels may look a little past the end

  void swap(Array& other) {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(bytes_, other.bytes_);
  }

  void* base_ = nullptr;
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t bytes_ = 0;
};

// A piece of somebody else's array.
template <typename T>
struct Span {
  T* data_ = nullptr;
  size_t size_ = 0;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
};

// Many arrays that live equally long, one behind the other: a huge page of its own for the end of each would be a third
// more memory for a small model.
template <typename T>
class Arena {
 public:
  Span<T> take(size_t size) {
    const size_t padded = (size * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment / sizeof(T);
    if (chunks_.empty() || used_ + padded > chunks_.back().size()) {
      chunks_.emplace_back(std::max(padded, kChunkBytes / sizeof(T)));
      used_ = 0;
    }
    const Span<T> span{chunks_.back().data() + used_, size};
    used_ += padded;
    return span;
  }

 private:
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kChunkBytes = size_t(256) << 20;  // committed only where it is written

  std::vector<Array<T>> chunks_;
  size_t used_ = 0;  // of the last one
};

}  // namespace noria
