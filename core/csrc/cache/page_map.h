// Owning pointers by page hash: open addressing, so that a look-up touches one place and an entry allocates nothing.
//
// A null value marks a free place. Entries stand at their hash's place or behind it without a free place between (linear probing), and
// at most half of the places are taken. Erasing moves later entries up, so that no place has to remember that it was used.
//
// The interface is the part of std::unordered_map that its users need. Iterators and references last until the next emplace or erase.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <utility>
#include <vector>

#include "cache/page_hash.h"

namespace tokenspeed {

template <class Pointer>
class PageMap {
 public:
  struct Entry {
    PageHash first;
    Pointer second;
  };

  template <class At>
  class Iterator {
   public:
    Iterator(At* at, At* end) noexcept : at_(at), end_(end) {}
    At& operator*() const noexcept { return *at_; }
    At* operator->() const noexcept { return at_; }
    Iterator& operator++() noexcept {
      ++at_;
      return Settle();
    }
    Iterator& Settle() noexcept {
      while (at_ != end_ && !at_->second) ++at_;
      return *this;
    }
    friend bool operator==(const Iterator& a, const Iterator& b) noexcept { return a.at_ == b.at_; }

   private:
    friend class PageMap;
    At* at_;
    At* end_;
  };

  // Does not grow up to `expected` entries.
  explicit PageMap(size_t expected) : places_(std::bit_ceil(2 * std::max<size_t>(expected, 4))) {}

  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] auto begin() noexcept { return Iterator<Entry>(places_.data(), Past()).Settle(); }
  [[nodiscard]] auto end() noexcept { return Iterator<Entry>(Past(), Past()); }
  [[nodiscard]] auto begin() const noexcept { return Iterator<const Entry>(places_.data(), Past()).Settle(); }
  [[nodiscard]] auto end() const noexcept { return Iterator<const Entry>(Past(), Past()); }

  [[nodiscard]] auto find(const PageHash& hash) noexcept {
    Entry& entry = places_[PlaceFor(hash)];
    return entry.second ? Iterator<Entry>(&entry, Past()) : end();
  }
  [[nodiscard]] auto find(const PageHash& hash) const noexcept {
    const Entry& entry = places_[PlaceFor(hash)];
    return entry.second ? Iterator<const Entry>(&entry, Past()) : end();
  }
  [[nodiscard]] bool contains(const PageHash& hash) const noexcept { return static_cast<bool>(places_[PlaceFor(hash)].second); }

  // Begins to bring its place into the processor's cache: for many look-ups to come, which would otherwise wait one after the other.
  // Always inlined, for GCC takes a call that only prefetches for one without effect.
  [[gnu::always_inline]] void Warm(const PageHash& hash) const noexcept { __builtin_prefetch(&places_[HomeOf(hash)]); }

  // REQUIRES: the hash is not in the map, and the value is not null.
  void emplace(const PageHash& hash, Pointer value) {
    if (2 * (size_ + 1) > places_.size()) {
      for (Entry& entry : std::exchange(places_, std::vector<Entry>(2 * places_.size()))) {
        if (entry.second) places_[PlaceFor(entry.first)] = std::move(entry);
      }
    }
    Entry& entry = places_[PlaceFor(hash)];
    assert(value && !entry.second);
    entry = {hash, std::move(value)};
    ++size_;
  }
  // Its value may have been moved away.
  void erase(const Iterator<Entry>& at) noexcept {
    const size_t mask = places_.size() - 1;
    auto hole = static_cast<size_t>(at.at_ - places_.data());
    for (size_t next = (hole + 1) & mask; places_[next].second; next = (next + 1) & mask) {
      const size_t from_home = (next - HomeOf(places_[next].first)) & mask;
      if (from_home < ((next - hole) & mask)) continue;  // it would stand before its place
      places_[hole] = std::move(places_[next]);
      hole = next;
    }
    places_[hole].second = nullptr;
    --size_;
  }

 private:
  [[nodiscard]] size_t HomeOf(const PageHash& hash) const noexcept { return PageHashHasher{}(hash) & (places_.size() - 1); }
  // Where it is, or where it would be.
  [[nodiscard]] size_t PlaceFor(const PageHash& hash) const noexcept {
    size_t at = HomeOf(hash);
    while (places_[at].second && !(places_[at].first == hash)) at = (at + 1) & (places_.size() - 1);
    return at;
  }
  [[nodiscard]] Entry* Past() noexcept { return places_.data() + places_.size(); }
  [[nodiscard]] const Entry* Past() const noexcept { return places_.data() + places_.size(); }

  std::vector<Entry> places_;
  size_t size_ = 0;
};

}  // namespace tokenspeed
