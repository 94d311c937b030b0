// A growable flat array whose memory may be shared with readers that outlive the next growth.
//
// Who frees: the block is reference-counted. A reader (a numpy view) keeps a copy of `block()`; when the column grows it moves to
// a new block and the reader's stays as it was. Reading past the column's next Clear() sees new values, never freed memory.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace tokenspeed {

template <class T>
class Column {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Column() = default;
  explicit Column(size_t capacity) { Reserve(capacity); }

  void Clear() noexcept { size_ = 0; }
  void Reserve(size_t capacity) {
    if (capacity <= capacity_) return;
    std::shared_ptr<T[]> block(new T[capacity]);
    if (size_ != 0) std::memcpy(block.get(), block_.get(), size_ * sizeof(T));
    block_ = std::move(block);
    data_ = block_.get();
    capacity_ = capacity;
  }
  void Push(T value) {
    if (size_ == capacity_) Reserve(std::max<size_t>(16, 2 * capacity_));
    data_[size_++] = value;
  }
  // Room for `count` more values, to be written by the caller.
  T* Extend(size_t count) {
    if (size_ + count > capacity_) Reserve(std::max(size_ + count, 2 * capacity_));
    T* begin = data_ + size_;
    size_ += count;
    return begin;
  }

  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] const T* begin() const noexcept { return data_; }
  [[nodiscard]] const T* end() const noexcept { return data_ + size_; }
  T& operator[](size_t index) noexcept {
    assert(index < size_);
    return data_[index];
  }
  const T& operator[](size_t index) const noexcept {
    assert(index < size_);
    return data_[index];
  }
  [[nodiscard]] std::shared_ptr<T[]> block() const noexcept { return block_; }

 private:
  std::shared_ptr<T[]> block_;
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace tokenspeed
