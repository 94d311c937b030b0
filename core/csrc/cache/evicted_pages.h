// Remembers which pages were in the cache and left it, so that a miss can be told from a prompt that nobody sent before.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cache/page_hash.h"

namespace tokenspeed {

// A table of fingerprints, one place a hash: a later page may take an earlier one's place, and is remembered instead. So it forgets,
// the older the likelier, and takes the same memory for ever.
class EvictedPages {
 public:
  // A few times as many as the tiers hold.
  explicit EvictedPages(int64_t pages)
      : places_(std::bit_ceil(static_cast<size_t>(std::clamp<int64_t>(4 * pages, kLeast, kMost))), 0) {}

  void Add(const PageHash& hash) noexcept { places_[PlaceOf(hash)] = Fingerprint(hash); }
  [[nodiscard]] bool Contains(const PageHash& hash) const noexcept { return places_[PlaceOf(hash)] == Fingerprint(hash); }
  void Clear() noexcept { std::fill(places_.begin(), places_.end(), 0); }

 private:
  static constexpr int64_t kLeast = 1 << 10, kMost = 1 << 22;

  [[nodiscard]] size_t PlaceOf(const PageHash& hash) const noexcept { return PageHashHasher{}(hash) & (places_.size() - 1); }
  // Of the bytes that do not choose the place; never 0, which stands for nothing.
  static uint64_t Fingerprint(const PageHash& hash) noexcept {
    uint64_t word;
    std::memcpy(&word, hash.bytes.data() + 8, sizeof(word));
    return word | 1;
  }

  std::vector<uint64_t> places_;
};

}  // namespace tokenspeed
