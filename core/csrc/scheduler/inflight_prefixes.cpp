#include "scheduler/inflight_prefixes.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace tokenspeed {

void PrefixClaim::Drop::operator()(ClaimRecord* record) const noexcept {
  record->table->Unkey(*record);
  record->table->Wake(*record, std::numeric_limits<int32_t>::max());
  delete record;
}

void PrefixClaim::Advance(int32_t published) {
  if (record_ == nullptr || published == record_->published) return;
  InflightPrefixes& table = *record_->table;
  table.Unkey(*record_);
  record_->published = published;
  table.Key(*record_);
  table.Wake(*record_, published);
}

PrefixClaim InflightPrefixes::Claim(const std::vector<PageHash>& chain, int32_t published, int32_t end) {
  if (published >= end) return PrefixClaim();
  PrefixClaim claim(new ClaimRecord{.table = this, .chain = &chain, .published = published, .end = end, .keyed = false, .waiters = {}});
  Key(*claim.record_);
  return claim;
}

void InflightPrefixes::Key(ClaimRecord& record) {
  if (record.published >= record.end) return;
  record.keyed = computing_.emplace((*record.chain)[static_cast<size_t>(record.published)], &record).second;
}

void InflightPrefixes::Unkey(ClaimRecord& record) noexcept {
  if (!record.keyed) return;
  computing_.erase((*record.chain)[static_cast<size_t>(record.published)]);
  record.keyed = false;
}

bool InflightPrefixes::ParkIfComputing(PrefixWaiter& waiter, const std::vector<PageHash>& chain, int32_t depth, int32_t limit) {
  assert(!waiter.parked() && depth < limit);
  const auto found = computing_.find(chain[static_cast<size_t>(depth)]);
  if (found == computing_.end()) return false;
  ClaimRecord& record = *found->second;
  // The chains agree up to some depth and differ ever after: bisect for it. They agree at `depth`.
  int32_t same = depth + 1;
  int32_t differ = std::min(limit, record.end) + 1;
  while (same + 1 < differ) {
    const int32_t middle = same + (differ - same) / 2;
    const auto last = static_cast<size_t>(middle - 1);
    (chain[last] == (*record.chain)[last] ? same : differ) = middle;
  }
  waiter.on_ = &record;
  waiter.place_ = record.waiters.emplace(same, &waiter);
  return true;
}

void InflightPrefixes::Unpark(PrefixWaiter& waiter) noexcept {
  if (!waiter.parked()) return;
  waiter.on_->waiters.erase(waiter.place_);
  waiter.on_ = nullptr;
}

void InflightPrefixes::Wake(ClaimRecord& record, int32_t published) {
  const auto end = record.waiters.upper_bound(published);
  for (auto waiter = record.waiters.begin(); waiter != end; ++waiter) {
    waiter->second->on_ = nullptr;
    woken_.push_back(waiter->second);
  }
  record.waiters.erase(record.waiters.begin(), end);
}

}  // namespace tokenspeed
