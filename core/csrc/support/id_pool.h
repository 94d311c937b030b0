// A pool of small integer ids (pages, slots) and the move-only lease on one of them.
//
// Who owns what: the pool owns the ids that are free; a lease owns the one that it names until it is destroyed, and its
// destructor gives it back. There is no other way to give an id back, so there is nothing to forget and nothing to do twice.
//
//     ids 0..total-1  =  free (in the pool)  +  leased (one live lease each)
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tokenspeed {

template <class Tag>
class IdPool;

// REQUIRES: the pool outlives every lease taken from it.
template <class Tag>
class IdLease {
 public:
  IdLease() noexcept = default;
  IdLease(IdLease&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, -1)) {}
  IdLease& operator=(IdLease&& other) noexcept {
    if (this != &other) {
      Release();
      pool_ = std::exchange(other.pool_, nullptr);
      id_ = std::exchange(other.id_, -1);
    }
    return *this;
  }
  IdLease(const IdLease&) = delete;
  IdLease& operator=(const IdLease&) = delete;
  ~IdLease() { Release(); }

  // -1 for an empty lease.
  [[nodiscard]] int32_t id() const noexcept { return id_; }
  explicit operator bool() const noexcept { return pool_ != nullptr; }

 private:
  friend class IdPool<Tag>;
  IdLease(IdPool<Tag>* pool, int32_t id) noexcept : pool_(pool), id_(id) {}
  void Release() noexcept {
    if (pool_ != nullptr) std::exchange(pool_, nullptr)->GiveBack(std::exchange(id_, -1));
  }

  IdPool<Tag>* pool_ = nullptr;
  int32_t id_ = -1;
};

template <class Tag>
class IdPool {
 public:
  // Ids are handed out lowest first from a fresh pool, then the one given back last: the order depends on the calls alone.
  explicit IdPool(int32_t total) : total_(total) {
    free_.reserve(static_cast<size_t>(total));
    for (int32_t id = total - 1; id >= 0; --id) free_.push_back(id);
  }
  IdPool(const IdPool&) = delete;
  IdPool& operator=(const IdPool&) = delete;
  ~IdPool() { assert(available() == total_ && "a lease outlived its pool"); }

  // REQUIRES: available() > 0.
  [[nodiscard]] IdLease<Tag> Take() noexcept {
    assert(!free_.empty());
    const int32_t id = free_.back();
    free_.pop_back();
    return IdLease<Tag>(this, id);
  }

  [[nodiscard]] int32_t total() const noexcept { return total_; }
  [[nodiscard]] int32_t available() const noexcept { return static_cast<int32_t>(free_.size()); }
  [[nodiscard]] const std::vector<int32_t>& free_ids() const noexcept { return free_; }

 private:
  friend class IdLease<Tag>;
  // Never allocates: the capacity for every id was reserved at construction.
  void GiveBack(int32_t id) noexcept { free_.push_back(id); }

  int32_t total_;
  std::vector<int32_t> free_;
};

}  // namespace tokenspeed
