// Pages of a window or recurrent group by the block that they belong to: what an adjunct of the prefix tree's nodes would hold.
//
// A block hash names a whole prefix, so a flat map finds them, and edges of the tree split and merge without touching it. A page is
//
//     free  --Take-->  leased by whoever writes it  --Publish-->  in the map  --(coldest one without a pin, or Drop)-->  free
//
// Kept at all times (CheckIntegrity):
//   * a page with a pin is neither evicted nor used again; three lists hold exactly the entries without one, the coldest first, and
//     nothing is taken from one before those before it are empty: what a running request left behind and nobody came back to; what was
//     used again, or ended with its request; what sessions keep. So a long prompt evicts what it left itself before others' last pages;
//   * available() = free pages + entries without a pin;
//   * an entry that was dropped while a copy to the host reads it is found by nobody, and its page is free with the last pin.
//
// The owner of the tree calls Drop for each block that the tree gives up, so that no entry outlives its block. REQUIRES of it: who pins
// an entry to use it pins its block in the tree as well; a copy to the host need not.
//
// Cost: O(1) each, nothing allocated but the map's nodes.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/evicted_pages.h"
#include "cache/kv_events.h"
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
  PageHash parent_;  // the block before its own; of no meaning at depth 0
  int32_t depth_ = 0;
  PageLease page_;
  int32_t pins_ = 0;
  bool found_ = true;     // not dropped
  bool copying_ = false;  // one of the pins is that of a copy to the host
  bool cold_ = false;     // that copy is no use of it
  uint32_t uses_ = 0;     // pins ever, without those of copies; Warm counts as one
  uint32_t uses_then_ = 0;  // when that copy was decided on
};

// Move-only: keeps an entry from being evicted. REQUIRES: the cache outlives it.
class AdjunctPin {
 public:
  AdjunctPin() noexcept = default;
  AdjunctPin(AdjunctPin&& other) noexcept
      : cache_(std::exchange(other.cache_, nullptr)), entry_(std::exchange(other.entry_, nullptr)), copies_(other.copies_) {}
  AdjunctPin& operator=(AdjunctPin&& other) noexcept {
    if (this != &other) {
      Release();
      cache_ = std::exchange(other.cache_, nullptr);
      entry_ = std::exchange(other.entry_, nullptr);
      copies_ = other.copies_;
    }
    return *this;
  }
  AdjunctPin(const AdjunctPin&) = delete;
  AdjunctPin& operator=(const AdjunctPin&) = delete;
  ~AdjunctPin() { Release(); }

  explicit operator bool() const noexcept { return cache_ != nullptr; }
  [[nodiscard]] int32_t page() const noexcept { return entry_->page_.id(); }
  [[nodiscard]] const PageHash& hash() const noexcept { return entry_->hash_; }
  [[nodiscard]] const PageHash& parent() const noexcept { return entry_->parent_; }
  [[nodiscard]] int32_t depth() const noexcept { return entry_->depth_; }
  // Nobody else pins it: releasing this makes it available.
  [[nodiscard]] bool sole() const noexcept { return entry_->pins_ == 1; }

 private:
  friend class AdjunctCache;
  AdjunctPin(AdjunctCache* cache, AdjunctEntry* entry, bool copies = false) noexcept : cache_(cache), entry_(entry), copies_(copies) {}
  void Release() noexcept;

  AdjunctCache* cache_ = nullptr;
  AdjunctEntry* entry_ = nullptr;
  bool copies_ = false;
};

class AdjunctCache {
 public:
  // `events`: told of what enters and leaves, where there is one; it outlives the cache.
  explicit AdjunctCache(int32_t pages, KvEventLog* events = nullptr, int32_t group = 0)
      : pool_(pages), events_(events), group_(group), gone_(pages) {}
  AdjunctCache(const AdjunctCache&) = delete;
  AdjunctCache& operator=(const AdjunctCache&) = delete;

  [[nodiscard]] bool Has(const PageHash& hash) const noexcept { return entries_.contains(hash); }
  // It is there without a pin: a pin takes it from what is available.
  [[nodiscard]] bool Idle(const PageHash& hash) const noexcept;
  // It is there and somebody has it pinned: a pin takes nothing from what is available.
  [[nodiscard]] bool Used(const PageHash& hash) const noexcept { return Users(hash) > 0; }
  // How many pins are on it; those of copies too.
  [[nodiscard]] int32_t Users(const PageHash& hash) const noexcept;
  // REQUIRES: Has(hash).
  [[nodiscard]] AdjunctPin Pin(const PageHash& hash) noexcept;
  // For a copy to the host, or an empty pin where one is under way already. `cold`: its end puts an entry that nobody used since in front
  // of the others, for it is on the host now. REQUIRES: Has(hash).
  [[nodiscard]] AdjunctPin PinToCopy(const PageHash& hash, bool cold = false) noexcept;
  // Up to `pages` of the entries that would be evicted next on which wanted(hash) holds, each pinned as by PinToCopy(hash, true).
  template <class Wanted>
  [[nodiscard]] std::vector<AdjunctPin> PinCold(int32_t pages, Wanted&& wanted) {
    std::vector<AdjunctEntry*> found;
    const auto look = [&](AdjunctEntry& entry) {
      if (!entry.copying_ && wanted(entry.hash_)) found.push_back(&entry);
      return --pages > 0;
    };
    if (pages > 0) behind_.VisitWhile(look);
    if (pages > 0) lru_.VisitWhile(look);
    if (pages > 0) kept_.VisitWhile(look);
    std::vector<AdjunctPin> pins;
    for (AdjunctEntry* entry : found) pins.push_back(CopyPin(*entry, true));
    return pins;
  }
  // Hands the page over and pins it. Where the block has a page already nothing changes, and the pin is empty.
  [[nodiscard]] AdjunctPin Publish(const PageHash& hash, PageLease& page, const PageHash& parent = {}, int32_t depth = 0);
  // The tree gave the block up. REQUIRES: no pin on it but that of a copy. `record`: whether events tell of it.
  void Drop(const PageHash& hash, bool record = true) noexcept;
  // Drops every entry without a pin.
  void DropIdle(bool record);
  // Somebody may well go on from it: it is not what a request left behind.
  void Warm(const PageHash& hash) noexcept;
  // A free page, or that of the coldest entry without a pin. REQUIRES: available() > 0.
  [[nodiscard]] PageLease Take();

  // A session keeps the page of that block above others, whether it is here or will come back; each Keep is ended by an Unkeep. Whether
  // it is the first to, and the last.
  bool Keep(const PageHash& hash);
  bool Unkeep(const PageHash& hash) noexcept;
  // Pages that can be had without those that somebody may well go on from.
  [[nodiscard]] bool disposable() const noexcept { return free() > 0 || !behind_.empty(); }
  // It was there and was evicted, or left with its block, as far as is remembered.
  [[nodiscard]] bool Evicted(const PageHash& hash) const noexcept { return gone_.Contains(hash); }
  // Blocks that sessions keep.
  [[nodiscard]] int32_t kept() const noexcept { return static_cast<int32_t>(keepers_.size()); }

  [[nodiscard]] int32_t total() const noexcept { return pool_.total(); }
  [[nodiscard]] int32_t free() const noexcept { return pool_.available(); }
  // Entries without a pin.
  [[nodiscard]] int32_t evictable() const noexcept { return evictable_; }
  [[nodiscard]] int32_t available() const noexcept { return free() + evictable_; }
  // Evicted to give their page to another; not those that left with their block.
  [[nodiscard]] int64_t evicted() const noexcept { return evicted_; }

  // Throws std::logic_error naming what is wrong. `pins`: how many pins the caller knows of, by page. `visit(page, hash)` for the
  // entries, `free(page)` for the other pages that it owns.
  template <class Visit, class Free>
  void CheckIntegrity(const std::unordered_map<int32_t, int32_t>& pins, Visit&& visit, Free&& free) const {
    Verify(pins);
    for (const auto& [hash, entry] : entries_) visit(entry.page_.id(), hash);
    for (const auto& dropped : dropped_) free(dropped.mapped().page_.id());
    for (const int32_t page : pool_.free_ids()) free(page);
  }

 private:
  friend class AdjunctPin;
  using Entries = std::unordered_map<PageHash, AdjunctEntry, PageHashHasher>;
  void AddPin(AdjunctEntry& entry) noexcept;
  [[nodiscard]] AdjunctPin CopyPin(AdjunctEntry& entry, bool cold) noexcept;
  void DropPin(AdjunctEntry& entry, bool copies) noexcept;
  [[nodiscard]] IntrusiveList<AdjunctEntry, AdjunctLruTag>& ListOf(const AdjunctEntry& entry) noexcept {
    if (!keepers_.empty() && keepers_.contains(entry.hash_)) return kept_;
    return entry.uses_ > 1 ? lru_ : behind_;
  }
  void Relist(const PageHash& hash) noexcept;
  void Removed(const AdjunctEntry& entry) noexcept {
    if (events_ != nullptr) events_->Removed(KvMedium::kDevice, entry.hash_, entry.depth_, group_);
  }
  void Verify(const std::unordered_map<int32_t, int32_t>& pins) const;

  PagePool pool_;  // declared before the entries, which hold its leases
  KvEventLog* const events_;
  const int32_t group_;
  Entries entries_;
  std::vector<Entries::node_type> dropped_;  // still read by a copy
  IntrusiveList<AdjunctEntry, AdjunctLruTag> behind_;
  IntrusiveList<AdjunctEntry, AdjunctLruTag> lru_;
  IntrusiveList<AdjunctEntry, AdjunctLruTag> kept_;
  EvictedPages gone_;
  std::unordered_map<PageHash, int32_t, PageHashHasher> keepers_;  // sessions by block
  int32_t evictable_ = 0;
  int64_t evicted_ = 0;
};

}  // namespace tokenspeed
