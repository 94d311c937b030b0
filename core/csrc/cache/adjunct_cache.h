// Pages of a window or recurrent group by the block that they belong to: what an adjunct of the prefix tree's nodes would hold.
//
// A block hash names a whole prefix, so a flat map finds them, and edges of the tree split and merge without touching it. A page is
//
//     free  --Take-->  leased by whoever writes it  --Publish-->  in the map  --(coldest one without a pin, or Drop)-->  free
//
// Kept at all times (CheckIntegrity):
//   * a page with a pin is neither evicted nor used again; the LRU list holds exactly the entries without one, the coldest first;
//   * available() = free pages + entries without a pin.
//
// The owner of the tree calls Drop for each block that the tree gives up, so that no entry outlives its block. REQUIRES of it: who pins
// an entry pins its block in the tree as well.
//
// Cost: O(1) each, nothing allocated but the map's nodes.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "cache/evicted_pages.h"
#include "cache/page_hash.h"
#include "cache/page_pool.h"
#include "support/intrusive_list.h"

namespace tokenspeed {

struct AdjunctLruTag;
class AdjunctCache;

class AdjunctEntry : public ListLink<AdjunctLruTag> {
 private:
  friend class AdjunctCache;
  friend class AdjunctPin;
  PageHash hash_;
  PageLease page_;
  int32_t pins_ = 0;
};

// Move-only: keeps an entry from being evicted. REQUIRES: the cache outlives it.
class AdjunctPin {
 public:
  AdjunctPin() noexcept = default;
  AdjunctPin(AdjunctPin&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)), entry_(std::exchange(other.entry_, nullptr)) {}
  AdjunctPin& operator=(AdjunctPin&& other) noexcept {
    if (this != &other) {
      Release();
      cache_ = std::exchange(other.cache_, nullptr);
      entry_ = std::exchange(other.entry_, nullptr);
    }
    return *this;
  }
  AdjunctPin(const AdjunctPin&) = delete;
  AdjunctPin& operator=(const AdjunctPin&) = delete;
  ~AdjunctPin() { Release(); }

  explicit operator bool() const noexcept { return cache_ != nullptr; }
  [[nodiscard]] int32_t page() const noexcept { return entry_->page_.id(); }
  // Nobody else pins it: releasing this makes it evictable.
  [[nodiscard]] bool sole() const noexcept { return entry_->pins_ == 1; }

 private:
  friend class AdjunctCache;
  AdjunctPin(AdjunctCache* cache, AdjunctEntry* entry) noexcept : cache_(cache), entry_(entry) {}
  void Release() noexcept;

  AdjunctCache* cache_ = nullptr;
  AdjunctEntry* entry_ = nullptr;
};

class AdjunctCache {
 public:
  explicit AdjunctCache(int32_t pages) : pool_(pages), evicted_pages_(pages) {}
  AdjunctCache(const AdjunctCache&) = delete;
  AdjunctCache& operator=(const AdjunctCache&) = delete;

  [[nodiscard]] bool Has(const PageHash& hash) const noexcept { return entries_.contains(hash); }
  // It was there, and was evicted to give its page to another.
  [[nodiscard]] bool Evicted(const PageHash& hash) const noexcept { return evicted_pages_.Contains(hash); }
  void ForgetEvicted() noexcept { evicted_pages_.Clear(); }
  // It is there without a pin: a pin takes it from what is available.
  [[nodiscard]] bool Idle(const PageHash& hash) const noexcept;
  // REQUIRES: Has(hash).
  [[nodiscard]] AdjunctPin Pin(const PageHash& hash) noexcept;
  // Hands the page over and pins it. Where the block has a page already nothing changes, and the pin is empty.
  [[nodiscard]] AdjunctPin Publish(const PageHash& hash, PageLease& page);
  // The tree gave the block up. REQUIRES: no pin on it.
  void Drop(const PageHash& hash) noexcept;
  // A free page, or that of the coldest entry without a pin. REQUIRES: available() > 0.
  [[nodiscard]] PageLease Take();

  [[nodiscard]] int32_t total() const noexcept { return pool_.total(); }
  [[nodiscard]] int32_t free() const noexcept { return pool_.available(); }
  // Entries without a pin.
  [[nodiscard]] int32_t evictable() const noexcept { return evictable_; }
  [[nodiscard]] int32_t available() const noexcept { return free() + evictable_; }
  // Evicted to give their page to another; not those that left with their block.
  [[nodiscard]] int64_t evicted() const noexcept { return evicted_; }

  // Throws std::logic_error naming what is wrong. `pins`: how many pins the caller knows of, by page. `visit(page, hash)` for the
  // entries, `free(page)` for the free pages.
  template <class Visit, class Free>
  void CheckIntegrity(const std::unordered_map<int32_t, int32_t>& pins, Visit&& visit, Free&& free) const {
    Verify(pins);
    for (const auto& [hash, entry] : entries_) visit(entry.page_.id(), hash);
    for (const int32_t page : pool_.free_ids()) free(page);
  }

 private:
  friend class AdjunctPin;
  void AddPin(AdjunctEntry& entry) noexcept;
  void DropPin(AdjunctEntry& entry) noexcept;
  void Verify(const std::unordered_map<int32_t, int32_t>& pins) const;

  PagePool pool_;  // declared before the entries, which hold its leases
  std::unordered_map<PageHash, AdjunctEntry, PageHashHasher> entries_;
  IntrusiveList<AdjunctEntry, AdjunctLruTag> lru_;
  int32_t evictable_ = 0;
  int64_t evicted_ = 0;
  EvictedPages evicted_pages_;
};

}  // namespace tokenspeed
