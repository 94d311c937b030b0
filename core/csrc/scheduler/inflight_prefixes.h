// Which prefixes are being computed right now, and who waits for them.
//
// A prefilling request claims the next page that it will publish. A request whose own next page is that one does not compute it
// again: it parks on the claim until everything that the two share is published. When the claim goes away early (abort, failure,
// retraction) its waiters wake, and the first of them to be admitted claims the page in turn.
//
//     chain of the owner    [p0 p1 p2 p3 p4 p5]      published = 2, key = hash of p2
//     chain of a waiter     [p0 p1 p2 p3 x4]         wakes when published reaches 4
//
// Who owns what: a PrefixClaim owns its record; its destructor wakes the waiters. The chains belong to the requests and must
// outlive their claims. Cost: O(1) a publication plus O(waiters woken).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/page_hash.h"

namespace tokenspeed {

class InflightPrefixes;
class PrefixWaiter;

struct ClaimRecord {
  InflightPrefixes* table;
  const std::vector<PageHash>* chain;
  int32_t published;  // pages; the key is chain[published] where that is below `end`
  int32_t end;
  bool keyed = false;  // false where another claim has that key already, or nothing is left to publish
  std::multimap<int32_t, PrefixWaiter*> waiters;  // by the depth that wakes them
};

// Move-only. REQUIRES: the table outlives it.
class PrefixClaim {
 public:
  PrefixClaim() noexcept = default;
  // Called when pages were published: wakes those whose shared part is there.
  void Advance(int32_t published);

 private:
  friend class InflightPrefixes;
  struct Drop {
    void operator()(ClaimRecord* record) const noexcept;
  };
  explicit PrefixClaim(ClaimRecord* record) noexcept : record_(record) {}
  std::unique_ptr<ClaimRecord, Drop> record_;
};

// The waiting side, embedded in a request; it stops waiting when it is destroyed.
class PrefixWaiter {
 public:
  PrefixWaiter() = default;
  PrefixWaiter(const PrefixWaiter&) = delete;
  PrefixWaiter& operator=(const PrefixWaiter&) = delete;
  ~PrefixWaiter() {
    if (on_ != nullptr) on_->waiters.erase(place_);
  }
  [[nodiscard]] bool parked() const noexcept { return on_ != nullptr; }

 private:
  friend class InflightPrefixes;
  ClaimRecord* on_ = nullptr;
  std::multimap<int32_t, PrefixWaiter*>::iterator place_;
};

class InflightPrefixes {
 public:
  InflightPrefixes() = default;
  InflightPrefixes(const InflightPrefixes&) = delete;
  InflightPrefixes& operator=(const InflightPrefixes&) = delete;

  // Claims pages [published, end) of `chain`.
  [[nodiscard]] PrefixClaim Claim(const std::vector<PageHash>& chain, int32_t published, int32_t end);

  // Parks `waiter` if its page at `depth` is being computed. `limit`: pages that it could use at most.
  // REQUIRES: !waiter.parked(), depth < limit <= chain.size().
  bool ParkIfComputing(PrefixWaiter& waiter, const std::vector<PageHash>& chain, int32_t depth, int32_t limit);
  void Unpark(PrefixWaiter& waiter) noexcept;
  [[nodiscard]] bool Computing(const PageHash& hash) const noexcept { return computing_.contains(hash); }

  // Waiters that woke since the last call, in the order in which they did. The caller queues them again.
  [[nodiscard]] std::vector<PrefixWaiter*> TakeWoken() { return std::exchange(woken_, {}); }
  [[nodiscard]] bool any_woken() const noexcept { return !woken_.empty(); }

 private:
  friend class PrefixClaim;
  void Key(ClaimRecord& record);
  void Unkey(ClaimRecord& record) noexcept;
  void Wake(ClaimRecord& record, int32_t published);

  std::unordered_map<PageHash, ClaimRecord*, PageHashHasher> computing_;
  std::vector<PrefixWaiter*> woken_;
};

}  // namespace tokenspeed
