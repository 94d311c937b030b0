// The store below the host: what it is asked for a request or session, and what is kept in it.
//
//     lookup: how far do the full groups' blocks reach?  -->  lookups: which windows and states are there?  -->  prefetches  -->  go on
//
// The answer to the first bounds what the others are asked. They are asked at the deepest boundary that could be common to all groups by
// what is known then, counting what nobody has asked for as there: an answer confirms the boundary or moves it up, so the one at which
// nothing is left to ask is the deepest. All that it takes there is brought to host pages; each op has pages of one group.
//
// Whatever the store says is a hint. What does not come is not there: the request goes on where the tiers above can, and its deadline
// bounds all of this together.
#include <algorithm>
#include <set>
#include <utility>

#include "scheduler/scheduler.h"

namespace tokenspeed {

namespace {

constexpr size_t kStorePages = 64;           // of one store op
constexpr size_t kStoreStates = 4;           // a state is as large as many pages
constexpr size_t kStoreOpsInPlan = 4;        // so that a plan stays short after a long prompt
constexpr size_t kMaxPendingStores = 1 << 20;  // pages: a store that does not answer loses them, and memory does not grow
constexpr int32_t kMostDoublings = 3;        // of the states asked for at once

}  // namespace

// ---- who asks ----

// Whether boundaries may lie so far apart that the store is asked for what lies between.
bool Scheduler::WorthAsking(int32_t from, int32_t limit) const {
  // No group has one there but at a multiple of each interval.
  const auto anywhere = [&](const AdjunctGroup& group, int32_t block) {
    return group.kind != CacheGroupKind::kRecurrent || (block + 1) % (group.interval / page_size_) == 0;
  };
  return int64_t{CommonBoundary(limit, anywhere) - from} * page_size_ >= config_.prefetch_threshold;
}

void Scheduler::AskStoreFor(Request& request) {
  if (!config_.l3 || request.max_reuse_tokens == 0) return;
  const int32_t limit = MatchLimit(request);
  request.hint = tree_.Match(request.hashes, limit);
  const int32_t begin = host_.Match(request.hashes, request.hint.depth(), limit);
  const int32_t from = ResumableDepth(request.hashes, begin);
  if (!WorthAsking(from, limit)) return;
  Apply(request, AskStore{});
  request.fetch = BeginFetch({.owner = {request.id, request.order.arrival}, .limit = limit, .from = from, .begin = begin});
  fetch_deadlines_.push_back({now_us_ + config_.prefetch_timeout_us, request.fetch});
}

int64_t Scheduler::BeginFetch(Fetch fetch) {
  if (fetch.begin == fetch.limit) fetch.full = fetch.limit;
  fetches_.emplace_hint(fetches_.end(), next_fetch_, std::move(fetch));
  pending_lookups_.push_back(next_fetch_);
  return next_fetch_++;
}

const std::vector<PageHash>* Scheduler::AskedFor(int64_t fetch) {
  const auto found = fetches_.find(fetch);
  if (found == fetches_.end()) return nullptr;
  const RequestKey& owner = found->second.owner;
  if (owner.session >= 0) {
    const auto session = sessions_.find(owner.session);
    if (session != sessions_.end() && session->second.fetch == fetch) return &session->second.hashes;
  } else {
    const Request* request = Find(owner);
    if (request != nullptr && request->fetch == fetch && NameOf(request->state) == StateName::kPrefetching) return &request->hashes;
  }
  fetches_.erase(found);
  return nullptr;
}

void Scheduler::EndFetch(int64_t id) {
  const RequestKey key = fetches_.at(id).owner;
  fetches_.erase(id);
  if (key.session >= 0) {
    sessions_.at(key.session).fetch = -1;
    QueueSessionLoad(key.session);
    return;
  }
  Request& request = *Find(key);
  request.fetch = -1;
  Apply(request, StoreAnswered{});
  waiting_.emplace(request.order, &request);
}

void Scheduler::ExpireFetches() {
  while (!fetch_deadlines_.empty() && fetch_deadlines_.front().at_us <= now_us_) {
    const int64_t id = fetch_deadlines_.front().fetch;
    fetch_deadlines_.pop_front();
    if (AskedFor(id) == nullptr) continue;
    ++totals_.prefetch_timeouts;
    Find(fetches_.at(id).owner)->fetch_timed_out = true;
    EndFetch(id);
  }
}

// ---- questions ----

// What nobody was asked for counts as there.
bool Scheduler::MayHave(const Fetch& fetch, const PageHash& hash, const AdjunctGroup& group, int32_t block) const {
  if (group.Has(hash, true)) return true;
  const auto told = fetch.told.find({group.place, block});
  return group.host.on() && (told == fetch.told.end() || told->second);
}

int32_t Scheduler::BoundaryOf(const Fetch& fetch, const std::vector<PageHash>& hashes) const {
  return CommonBoundary(fetch.full, [&](const AdjunctGroup& group, int32_t block) {
    return MayHave(fetch, hashes[static_cast<size_t>(block)], group, block);
  });
}

// The last one first: where it is missing, none before it matters.
std::vector<int32_t> Scheduler::Unasked(const Fetch& fetch, const std::vector<PageHash>& hashes, const AdjunctGroup& group, int32_t boundary) const {
  std::vector<int32_t> blocks;
  const Blocks needed = NeededAt(group, boundary);
  for (int32_t block = needed.end - 1; block >= needed.begin; --block) {
    if (!group.Has(hashes[static_cast<size_t>(block)], true) && !fetch.told.contains({group.place, block})) blocks.push_back(block);
  }
  return blocks;
}

void Scheduler::BeginLookups() {
  for (const int64_t id : std::exchange(pending_lookups_, {})) {
    const std::vector<PageHash>* hashes = AskedFor(id);
    if (hashes == nullptr) continue;
    const Fetch& fetch = fetches_.at(id);
    if (fetch.full >= 0) {
      AskForHolds(id, *hashes);
      continue;
    }
    std::vector<int32_t> blocks(static_cast<size_t>(fetch.limit - fetch.begin));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = fetch.begin + static_cast<int32_t>(i);
    Ask(id, *hashes, 0, std::move(blocks));
  }
}

void Scheduler::Ask(int64_t id, const std::vector<PageHash>& hashes, size_t tier, std::vector<int32_t> blocks) {
  Fetch& fetch = fetches_.at(id);
  if (!std::exchange(fetch.asked, true)) ++totals_.lookups;
  const int64_t op = next_op_++;
  for (const int32_t block : blocks) {
    plan_->lookup.op.Push(op);
    plan_->lookup.group.Push(GroupOf(tier));
    plan_->lookup.hash.Push(hashes[static_cast<size_t>(block)]);
  }
  ++fetch.waits;
  ops_.emplace(op, LookupOp{id, tier, std::move(blocks)});
}

void Scheduler::AskForHolds(int64_t id, const std::vector<PageHash>& hashes) {
  Fetch& fetch = fetches_.at(id);
  const int32_t boundary = BoundaryOf(fetch, hashes);
  for (const AdjunctGroup& group : adjuncts_) {
    std::vector<int32_t> blocks = Unasked(fetch, hashes, group, boundary);
    if (blocks.empty()) continue;
    Ask(id, hashes, group.place + 1, std::move(blocks));
    if (group.kind != CacheGroupKind::kRecurrent) continue;
    // Where states are missing they may be for long: with each answer twice as many are asked for.
    const int32_t step = group.interval / page_size_;
    int32_t more = (1 << std::min(fetch.rounds, kMostDoublings)) - 1;
    for (int32_t at = boundary - step; more > 0 && at > fetch.from; at -= step, --more) {
      std::vector<int32_t> other = Unasked(fetch, hashes, group, at);
      if (!other.empty()) Ask(id, hashes, group.place + 1, std::move(other));
    }
  }
  ++fetch.rounds;
  if (fetch.waits == 0) Weigh(id, hashes);  // what was missing has come to the host meanwhile
}

void Scheduler::Answer(int64_t, LookupOp& op, int32_t pages) {
  const std::vector<PageHash>* hashes = AskedFor(op.fetch);
  if (hashes == nullptr) return;
  Fetch& fetch = fetches_.at(op.fetch);
  if (op.tier == 0) {
    fetch.full = fetch.begin + pages;
  } else {
    const auto count = std::min(op.blocks.size(), static_cast<size_t>(pages) + 1);
    for (size_t i = 0; i < count; ++i) fetch.told[{op.tier - 1, op.blocks[i]}] = i < static_cast<size_t>(pages);
  }
  if (--fetch.waits == 0) Weigh(op.fetch, *hashes);
}

// After answers: asks on, brings what is worth it, or lets the owner go on.
void Scheduler::Weigh(int64_t id, const std::vector<PageHash>& hashes) {
  Fetch& fetch = fetches_.at(id);
  fetch.goal = BoundaryOf(fetch, hashes);
  const bool worth = int64_t{fetch.goal - fetch.from} * page_size_ >= config_.prefetch_threshold;
  const bool known = std::ranges::all_of(adjuncts_, [&](const AdjunctGroup& group) { return Unasked(fetch, hashes, group, fetch.goal).empty(); });
  if (worth && !known) {
    pending_lookups_.push_back(id);
    return;
  }
  if (known && fetch.goal > fetch.from && !std::exchange(fetch.hit, true)) ++totals_.lookup_hits;
  if (Request* request = Find(fetch.owner); request != nullptr) {
    request->fetch_begin = fetch.from;
    request->fetch_goal = std::max(fetch.goal, fetch.from);
    request->fetch_full = fetch.full;
  }
  if (worth) pending_prefetches_.push_back(id);
  else EndFetch(id);
}

// ---- to the host ----

void Scheduler::BeginPrefetches() {
  for (const int64_t id : std::exchange(pending_prefetches_, {})) {
    if (const std::vector<PageHash>* hashes = AskedFor(id); hashes != nullptr) BeginPrefetch(id, *hashes);
  }
}

// Brings what the store has and the host has not. Pages that another prefetch brings already are waited for.
void Scheduler::BeginPrefetch(int64_t id, const std::vector<PageHash>& hashes) {
  Fetch& fetch = fetches_.at(id);
  std::vector<PrefetchOp> made;
  std::set<int64_t> others;
  // False where no host page is left for it.
  const auto bring = [&](PrefetchOp& op, int32_t block) {
    HostCache& host = HostOf(op.tier);
    const auto at = static_cast<size_t>(block);
    if (const HostEntry* entry = host.Find(hashes[at]); entry != nullptr) {
      const auto other = ops_.find(entry->arriving_by());
      if (other != ops_.end() && std::holds_alternative<PrefetchOp>(other->second)) others.insert(other->first);
      return true;
    }
    HostPin pin = host.Arrive(hashes[at], block > 0 ? hashes[at - 1] : PageHash{}, block, next_op_ + static_cast<int64_t>(made.size()));
    if (pin) op.host.push_back(std::move(pin));
    return !op.host.empty() && op.host.back().entry().hash() == hashes[at];
  };
  for (AdjunctGroup& group : adjuncts_) {
    const Blocks needed = NeededAt(group, fetch.goal);
    // What is there is not to give its page to what comes.
    for (int32_t block = needed.begin; block < needed.end; ++block) group.host.Touch(hashes[static_cast<size_t>(block)]);
    PrefetchOp op{group.place + 1, {}, {id}};
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      if (group.cache.Has(hashes[static_cast<size_t>(block)]) || bring(op, block)) continue;
      // Without it nothing else is of use, and another boundary takes as much.
      ++totals_.host_full;
      op.host.clear();
      made.clear();
      EndFetch(id);
      return;
    }
    if (!op.host.empty()) made.push_back(std::move(op));
  }
  PrefetchOp op{0, {}, {id}};
  for (int32_t block = fetch.begin; block < fetch.goal; ++block) {
    if (bring(op, block)) continue;
    totals_.host_full += fetch.goal - block;
    if (adjuncts_.empty()) break;
    // The blocks that there is room for may have a boundary that is less deep.
    fetch.full = block;
    op.host.clear();
    made.clear();
    Weigh(id, hashes);
    return;
  }
  if (!op.host.empty()) made.push_back(std::move(op));
  for (PrefetchOp& prefetch : made) {
    for (const HostPin& pin : prefetch.host) {
      plan_->prefetch.op.Push(next_op_);
      plan_->prefetch.group.Push(GroupOf(prefetch.tier));
      plan_->prefetch.host.Push(pin.page());
      plan_->prefetch.hash.Push(pin.entry().hash());
    }
    ops_.emplace(next_op_++, std::move(prefetch));
  }
  for (const int64_t other : others) std::get<PrefetchOp>(ops_.at(other)).fetches.push_back(id);
  fetch.waits = static_cast<int32_t>(made.size() + others.size());
  if (fetch.waits == 0) EndFetch(id);
}

void Scheduler::Answer(int64_t, PrefetchOp& op, int32_t pages) {
  totals_.pages_prefetched += pages;
  totals_.prefetches_failed += static_cast<int64_t>(op.host.size()) - pages;
  HostCache& host = HostOf(op.tier);
  for (int32_t i = 0; i < pages; ++i) {
    const HostPin& pin = op.host[static_cast<size_t>(i)];
    host.Land(pin);
    host.MarkStored(pin);
  }
  const int32_t end = pages == 0 ? 0 : op.host[static_cast<size_t>(pages - 1)].entry().depth() + 1;
  op.host.clear();
  for (const int64_t id : op.fetches) {
    if (AskedFor(id) == nullptr) continue;
    Fetch& fetch = fetches_.at(id);
    if (Request* request = Find(fetch.owner); request != nullptr) request->fetch_end = std::max({request->fetch_begin, request->fetch_end, end});
    if (--fetch.waits == 0) EndFetch(id);
  }
}

// ---- to the store ----

void Scheduler::QueueStore(size_t tier, const HostPin& pin) {
  if (config_.l3 && pin.entry().ready() && pending_stores_[tier].size() < kMaxPendingStores) pending_stores_[tier].push_back(pin.entry().hash());
}

// In turn, so that a long prompt's blocks do not keep its state waiting.
void Scheduler::BeginStores() {
  size_t idle = 0;
  for (size_t ops = 0; ops < kStoreOpsInPlan && idle < pending_stores_.size(); next_store_ = (next_store_ + 1) % pending_stores_.size()) {
    const bool begun = BeginStore(next_store_);
    ops += begun ? 1 : 0;
    idle = begun ? 0 : idle + 1;
  }
}

bool Scheduler::BeginStore(size_t tier) {
  std::deque<PageHash>& pending = pending_stores_[tier];
  HostCache& host = HostOf(tier);
  const bool states = tier > 0 && adjuncts_[tier - 1].kind == CacheGroupKind::kRecurrent;
  StoreOp op{tier, {}};
  while (!pending.empty() && op.host.size() < (states ? kStoreStates : kStorePages)) {
    const PageHash hash = pending.front();
    pending.pop_front();
    const HostEntry* entry = host.Find(hash);
    if (entry == nullptr || !entry->ready() || entry->stored()) continue;  // it left meanwhile
    op.host.push_back(host.Pin(hash));
    plan_->store.op.Push(next_op_);
    plan_->store.group.Push(GroupOf(tier));
    plan_->store.host.Push(op.host.back().page());
    plan_->store.hash.Push(hash);
  }
  if (op.host.empty()) return false;
  ops_.emplace(next_op_++, std::move(op));
  return true;
}

void Scheduler::Answer(int64_t, StoreOp& op, int32_t pages) {
  totals_.pages_stored += pages;
  totals_.stores_failed += static_cast<int64_t>(op.host.size()) - pages;
  for (int32_t i = 0; i < pages; ++i) {
    const HostPin& pin = op.host[static_cast<size_t>(i)];
    HostOf(op.tier).MarkStored(pin);
    events_.Stored(KvMedium::kStorage, pin.entry().hash(), pin.entry().parent(), pin.entry().depth(), 0, {}, GroupOf(op.tier));
  }
}

}  // namespace tokenspeed
