// Host pages by the hash that names them: the tier below the device's prefix tree.
//
// A page hash names a whole prefix, so a flat map finds what a tree would: a prefix is on the host as far as its pages are, one by
// one. Every page that the cache knows is in one of three states:
//
//     Arriving  --Land-->  Ready  --(coldest leaf, or Discard)-->  gone
//        |                                                          ^
//        +---------- its pin dropped without Land: failed ----------+
//
// Kept at all times (CheckIntegrity):
//   * only Ready pages match; a page with a pin (a transfer reads or writes it) is neither evicted nor used again;
//   * the two LRU lists hold exactly the Ready pages without a pin and without a child on the host, the coldest first: a prefix never
//     loses a page before those that build on it. Those of sessions stand in one of their own, from which nothing is taken before the
//     other is empty. Pages of a window or recurrent group build on none of their group, so such a cache is flat: nobody is another's
//     child;
//   * a discarded page that is still pinned is found by nobody, and its id is given back with the last pin.
//
// Cost: a lookup a page; Evict is O(1).
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/kv_events.h"
#include "cache/page_hash.h"
#include "cache/page_map.h"
#include "support/id_pool.h"
#include "support/intrusive_list.h"

namespace tokenspeed {

struct HostPageTag;
using HostPagePool = IdPool<HostPageTag>;
using HostPageLease = IdLease<HostPageTag>;

class HostCache;
struct HostLruTag;

class HostEntry : public ListLink<HostLruTag> {
 public:
  [[nodiscard]] int32_t page() const noexcept { return lease_.id(); }
  [[nodiscard]] const PageHash& hash() const noexcept { return hash_; }
  [[nodiscard]] const PageHash& parent() const noexcept { return parent_; }
  [[nodiscard]] int32_t depth() const noexcept { return depth_; }
  [[nodiscard]] bool ready() const noexcept { return state_ == State::kReady; }
  [[nodiscard]] bool stored() const noexcept { return stored_; }
  // The transfer that brings it, where one does.
  [[nodiscard]] int64_t arriving_by() const noexcept { return state_ == State::kArriving ? transfer_ : -1; }

 private:
  friend class HostCache;
  enum class State { kArriving, kReady, kDiscarded };
  PageHash hash_;
  PageHash parent_;  // the page before it; of no meaning at depth 0
  int32_t depth_ = 0;
  int32_t pins_ = 0;
  int32_t children_ = 0;  // known pages whose parent it is
  State state_ = State::kArriving;
  bool stored_ = false;  // the store below has it too
  bool kept_ = false;    // above others
  int64_t transfer_ = -1;
  uint64_t last_use_ = 0;
  HostPageLease lease_;
};

// Move-only: a transfer's hold on a host page. Dropping the pin of a page that has not landed forgets the page: a failed copy is a
// miss. REQUIRES: the cache outlives it.
class HostPin {
 public:
  HostPin() noexcept = default;
  HostPin(HostPin&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)), entry_(std::exchange(other.entry_, nullptr)) {}
  HostPin& operator=(HostPin&& other) noexcept {
    if (this != &other) {
      Release();
      cache_ = std::exchange(other.cache_, nullptr);
      entry_ = std::exchange(other.entry_, nullptr);
    }
    return *this;
  }
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;
  ~HostPin() { Release(); }

  explicit operator bool() const noexcept { return cache_ != nullptr; }
  [[nodiscard]] const HostEntry& entry() const noexcept { return *entry_; }
  [[nodiscard]] int32_t page() const noexcept { return entry_->page(); }

 private:
  friend class HostCache;
  HostPin(HostCache* cache, HostEntry* entry) noexcept : cache_(cache), entry_(entry) {}
  void Release() noexcept;

  HostCache* cache_ = nullptr;
  HostEntry* entry_ = nullptr;
};

enum class HostOrder { kChained, kFlat };

class HostCache {
 public:
  HostCache(int32_t pages, KvEventLog& events, int32_t group = 0, HostOrder order = HostOrder::kChained)
      : pool_(pages), events_(events), group_(group), chained_(order == HostOrder::kChained), entries_(static_cast<size_t>(pages)) {}
  HostCache(const HostCache&) = delete;
  HostCache& operator=(const HostCache&) = delete;

  [[nodiscard]] bool on() const noexcept { return pool_.total() > 0; }

  // The depth to which pages are Ready from `depth` on, at most `limit`. `known`: an earlier answer for the same chain, from which
  // the search goes on; with it the cost is O(what changed).
  [[nodiscard]] int32_t Match(std::span<const PageHash> hashes, int32_t depth, int32_t limit, int32_t known = 0) const noexcept;
  [[nodiscard]] const HostEntry* Find(const PageHash& hash) const noexcept;
  // It will be looked up soon, among many.
  [[gnu::always_inline]] void Warm(const PageHash& hash) const noexcept { entries_.Warm(hash); }
  [[nodiscard]] bool Ready(const PageHash& hash) const noexcept {
    const HostEntry* entry = Find(hash);
    return entry != nullptr && entry->ready();
  }
  // A hint from before the last discard may pass over a hole.
  [[nodiscard]] uint64_t discards() const noexcept { return discards_; }

  // A page for content that a transfer brings, or an empty pin where every page is in use. REQUIRES: Find(hash) == nullptr.
  [[nodiscard]] HostPin Arrive(const PageHash& hash, const PageHash& parent, int32_t depth, int64_t transfer);
  void Land(const HostPin& pin);
  // REQUIRES: Find(hash) names a Ready page.
  [[nodiscard]] HostPin Pin(const PageHash& hash) noexcept;
  // Nobody finds the page any more: its content is not what the name says.
  void Discard(const HostPin& pin) noexcept { Discard(*pin.entry_); }
  // As hot as anything, and with it all that it builds on.
  void Touch(const PageHash& hash) noexcept;
  // The store below has the page too.
  void MarkStored(const HostPin& pin) noexcept { pin.entry_->stored_ = true; }

  // From now on the page, here or still to come, is evicted only when nothing else is left, until Unkeep. Cost of that: O(leaves that
  // are colder). REQUIRES: kept with all that it builds on.
  void Keep(const PageHash& hash);
  void Unkeep(const PageHash& hash) noexcept;
  [[nodiscard]] size_t kept() const noexcept { return kept_names_.size(); }

  // Forgets everything, pages in transfer included.
  void Flush(bool record);

  [[nodiscard]] int32_t total() const noexcept { return pool_.total(); }
  [[nodiscard]] int32_t available() const noexcept { return pool_.available(); }
  [[nodiscard]] int32_t ready() const noexcept { return ready_; }
  [[nodiscard]] int32_t pinned() const noexcept { return pinned_; }
  [[nodiscard]] int64_t evicted() const noexcept { return evicted_; }

  // Throws std::logic_error naming what is wrong. `pins`: how many pins the caller knows of, by page.
  void CheckIntegrity(const std::unordered_map<int32_t, int32_t>& pins) const;

 private:
  friend class HostPin;
  // Whether it counts as a child of the page before it.
  [[nodiscard]] bool HasParent(int32_t depth) const noexcept { return chained_ && depth > 0; }
  [[nodiscard]] HostEntry* FindEntry(const PageHash& hash) const noexcept;
  bool EvictOne();
  void Discard(HostEntry& entry, bool record = true) noexcept;
  void DropPin(HostEntry& entry) noexcept;
  // Takes the entry out of the map; its parent may become a leaf.
  std::unique_ptr<HostEntry> Unmap(HostEntry& entry, bool record = true) noexcept;
  void Enlist(HostEntry& entry) noexcept;
  void Unlist(HostEntry& entry) noexcept;
  [[nodiscard]] IntrusiveList<HostEntry, HostLruTag>& ListOf(const HostEntry& entry) noexcept { return entry.kept_ ? kept_ : lru_; }
  [[nodiscard]] static bool Cold(const HostEntry& entry) noexcept { return entry.ready() && entry.pins_ == 0 && entry.children_ == 0; }

  HostPagePool pool_;  // declared before the entries, which hold its leases
  KvEventLog& events_;
  const int32_t group_;
  const bool chained_;
  PageMap<std::unique_ptr<HostEntry>> entries_;
  // Known pages whose parent is not known here, by the parent. None in a flat cache.
  std::unordered_map<PageHash, int32_t, PageHashHasher> orphans_;
  std::vector<std::unique_ptr<HostEntry>> discarded_;  // still pinned
  IntrusiveList<HostEntry, HostLruTag> lru_;
  IntrusiveList<HostEntry, HostLruTag> kept_;
  std::unordered_set<PageHash, PageHashHasher> kept_names_;
  int32_t ready_ = 0;
  int32_t pinned_ = 0;
  int64_t evicted_ = 0;
  uint64_t tick_ = 0;
  uint64_t discards_ = 0;
};

}  // namespace tokenspeed
