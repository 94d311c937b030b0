// Transfers between the tiers: begun by plans, answered in any order.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>

#include "scheduler/scheduler.h"

namespace tokenspeed {

Request* Scheduler::Find(const RequestKey& key) const {
  const auto found = requests_.find(key.id);
  return found == requests_.end() || found->second->order.arrival != key.arrival ? nullptr : found->second.get();
}

// ---- what is copied to the host ----

void Scheduler::QueueWrite(Request* owner, const NodePin& pin, int32_t begin) {
  if (!host_.on() || begin >= pin.depth()) return;
  PendingWrite write{{}, tree_.PinAgain(pin), begin, 0};
  if (owner != nullptr) {
    write.owner = {owner->id, owner->order.arrival};
    ++owner->writes;
  }
  pending_writes_.push_back(std::move(write));
}

int32_t Scheduler::MissingOnHost(const NodePin& pin, int32_t begin) const {
  int32_t missing = 0;
  PrefixTree::VisitPages(pin, begin, [&](int32_t, const PageHash& hash, int32_t) { missing += host_.Find(hash) == nullptr ? 1 : 0; });
  return missing;
}

int32_t Scheduler::PagesLeaving() const {
  if (!AnyMoving()) return 0;
  const auto runs = [&](const RequestKey& key) {
    const Request* owner = Find(key);
    return owner != nullptr && (owner->row >= 0 || NameOf(owner->state) == StateName::kPrefilling);
  };
  int32_t pages = 0;
  for (const auto& [id, op] : ops_) {
    const auto* write = std::get_if<WriteBackOp>(&op);
    if (write == nullptr || runs(write->owner)) continue;
    pages += std::max(static_cast<int32_t>(write->host.size()), PrefixTree::ExclusivePages(write->pin));
  }
  for (const PendingWrite& write : pending_writes_) {
    if (!runs(write.owner)) pages += std::max(write.pin.depth() - write.begin, PrefixTree::ExclusivePages(write.pin));
  }
  return pages;
}

bool Scheduler::AnyMoving() const { return moving_ > 0 || !pending_writes_.empty() || !pending_copies_.empty(); }

// Keeps the pages that would be evicted next on the host as well: as many as the next plan may take.
void Scheduler::QueueColdWrites() {
  const int32_t step_pages = PagesFor(config_.max_step_tokens()) + config_.max_num_seqs;
  // Half of the host at most, or those just copied would push each other out.
  if (!adjuncts_.empty()) QueueColdCopies(std::min(step_pages, pages_.total() / 2) - pages_.available());
  const int32_t lookahead = std::min({step_pages, pages_.total() / 2, host_.total() / 2}) - pages_.available();
  if (lookahead <= 0) return;
  auto runs = tree_.PinCold(lookahead, [&](const PageHash& hash) { return host_.Find(hash) == nullptr; });
  for (PrefixTree::ColdRun& run : runs) pending_writes_.push_back({{}, std::move(run.pin), run.begin, run.last_use});
}

void Scheduler::BeginTransfers() {
  if (!tiers_) return;
  if (!pending_sessions_.empty()) BeginSessionLoads();
  if (config_.write_policy == WritePolicy::kOnEvict) QueueColdWrites();
  if (!pending_writes_.empty()) BeginWrites();
  if (!pending_copies_.empty()) BeginCopies();
  if (!pending_lookups_.empty()) BeginLookups();
  if (!pending_prefetches_.empty()) BeginPrefetches();
  if (config_.l3) BeginStores();
}

void Scheduler::BeginWrites() {
  // Most writes are of a page that a row has filled: the places of all of them and of their parents are looked up in what follows.
  for (const PendingWrite& write : pending_writes_) {
    PrefixTree::VisitPages(write.pin, write.pin.depth() - 2, [&](int32_t, const PageHash& hash, int32_t) { host_.Warm(hash); });
  }
  for (PendingWrite& write : pending_writes_) {
    // The page before the first is its parent's name.
    const int32_t first = std::max(0, write.begin - 1);
    const auto count = static_cast<size_t>(write.pin.depth() - first);
    hash_scratch_.resize(count);
    index_scratch_.resize(count);
    PrefixTree::VisitPages(write.pin, first, [&](int32_t index, const PageHash& hash, int32_t page) {
      hash_scratch_[static_cast<size_t>(index - first)] = hash;
      index_scratch_[static_cast<size_t>(index - first)] = page;
    });
    const int64_t id = next_op_;
    WriteBackOp op{write.owner, std::move(write.pin), write.cold_since, {}};
    for (int32_t index = write.begin; index < first + static_cast<int32_t>(count); ++index) {
      const auto at = static_cast<size_t>(index - first);
      if (host_.Find(hash_scratch_[at]) != nullptr) continue;
      HostPin pin = host_.Arrive(hash_scratch_[at], index > 0 ? hash_scratch_[at - 1] : PageHash{}, index, id);
      if (!pin) {
        totals_.host_full += static_cast<int64_t>(count - at);
        break;
      }
      plan_->write_back.op.Push(id);
      plan_->write_back.group.Push(0);
      plan_->write_back.device.Push(index_scratch_[at]);
      plan_->write_back.host.Push(pin.page());
      op.host.push_back(std::move(pin));
    }
    if (op.host.empty()) {
      if (op.cold_since != 0) tree_.ReleaseCold(std::move(op.pin), op.cold_since);
      WriteEnded(op.owner);
      continue;
    }
    ++next_op_;
    ++moving_;
    if (spare_ops_.empty()) {
      ops_.emplace_hint(ops_.end(), id, std::move(op));
    } else {
      spare_ops_.back().key() = id;
      spare_ops_.back().mapped() = std::move(op);
      ops_.insert(ops_.end(), std::move(spare_ops_.back()));
      spare_ops_.pop_back();
    }
  }
  pending_writes_.clear();
}

void Scheduler::WriteEnded(const RequestKey& owner) {
  Request* request = Find(owner);
  if (request == nullptr || --request->writes > 0) return;
  const StateName name = NameOf(request->state);
  if (name == StateName::kWritingBack) {
    Apply(*request, Released{});
    Retire(*request);
  } else if (name == StateName::kRetracting && request->inflight_rows == 0) {
    Apply(*request, Released{});
    waiting_.emplace(request->order, request);
  }
}

// ---- answers ----

void Scheduler::CacheDone(std::span<const int64_t> op_ids, std::span<const int32_t> pages) {
  if (op_ids.size() != pages.size()) {
    throw std::invalid_argument("op_ids has " + std::to_string(op_ids.size()) + " entries and pages " + std::to_string(pages.size()) +
                                "; each op needs one count");
  }
  std::unordered_set<int64_t> seen;
  for (size_t i = 0; i < op_ids.size(); ++i) {
    const auto found = ops_.find(op_ids[i]);
    if (found == ops_.end() || !seen.insert(op_ids[i]).second) {
      throw std::invalid_argument("transfer " + std::to_string(op_ids[i]) + " is not in flight; each is answered once");
    }
    if (pages[i] < 0 || pages[i] > PagesOf(found->second)) {
      throw std::invalid_argument("transfer " + std::to_string(op_ids[i]) + " has " + std::to_string(PagesOf(found->second)) + " pages; " +
                                  std::to_string(pages[i]) + " of them cannot be good");
    }
  }
  for (size_t i = 0; i < op_ids.size(); ++i) {
    auto node = ops_.extract(op_ids[i]);  // stays where it is: a claim names the hashes in it
    std::visit([&](auto& concrete) { Answer(op_ids[i], concrete, pages[i]); }, node.mapped());
    node.mapped() = LookupOp{};  // what it held is given back now
    if (spare_ops_.size() < static_cast<size_t>(config_.max_num_seqs)) spare_ops_.push_back(std::move(node));
  }
  QueueWoken();
}

void Scheduler::Answer(int64_t, WriteBackOp& op, int32_t pages) {
  --moving_;
  totals_.pages_written_back += pages;
  totals_.write_backs_failed += static_cast<int64_t>(op.host.size()) - pages;
  for (int32_t i = 0; i < pages; ++i) {
    const HostPin& pin = op.host[static_cast<size_t>(i)];
    host_.Land(pin);
    QueueStore(0, pin);
  }
  op.host.clear();
  if (op.cold_since != 0) tree_.ReleaseCold(std::move(op.pin), op.cold_since);
  else op.pin = {};
  WriteEnded(op.owner);
}

void Scheduler::Answer(int64_t id, LoadBackOp& op, int32_t pages) {
  --moving_;
  const bool failed = pages < static_cast<int32_t>(op.host.size());
  totals_.pages_loaded_back += pages;
  totals_.load_backs_failed += static_cast<int64_t>(op.host.size()) - pages;
  for (size_t i = static_cast<size_t>(pages); i < op.host.size(); ++i) host_.Discard(op.host[i]);
  op.host.clear();
  if (op.pin) {
    const int32_t first = op.pin.depth();
    std::vector<PrefixTree::Replaced> replaced;  // what another brought meanwhile; these go back
    const auto count = static_cast<size_t>(pages);
    tree_.Publish(op.pin, std::span(op.hashes).subspan(static_cast<size_t>(first), count), std::span(op.device).first(count), replaced);
    for (int32_t index = first + static_cast<int32_t>(replaced.size()); events_.on() && index < first + pages; ++index) {
      const auto at = static_cast<size_t>(index);
      const std::span<const int32_t> tokens(op.tokens.data() + at * static_cast<size_t>(page_size_), static_cast<size_t>(page_size_));
      events_.Stored(KvMedium::kDevice, op.hashes[at], index > 0 ? op.hashes[at - 1] : PageHash{}, index, op.adapter, tokens);
    }
    op.claim = {};
    if (op.session >= 0 && !failed) pending_sessions_.push_back({op.session, 0, now_us_ + kSessionPatienceUs});
    return;
  }

  Request* request = Find(op.owner);
  Residence* residence = request == nullptr || std::erase(request->load_ops, id) == 0 ? nullptr : ResidenceOf(request->state);
  if (residence == nullptr) {
    // A step in flight may still read them, for a row that does not count.
    if (!steps_.empty()) {
      for (PageLease& page : op.device) deferred_.emplace_back(steps_.back().plan_id, std::move(page));
    }
    return;
  }
  residence->loading = 0;
  residence->tail.insert(residence->tail.begin(), std::make_move_iterator(op.device.begin()), std::make_move_iterator(op.device.end()));
  LoadAnswered(*request, *residence, failed);
}

void Scheduler::LoadAnswered(Request& request, Residence& residence, bool failed) {
  const bool runs = request.row >= 0 || NameOf(request.state) == StateName::kPrefilling;
  if (!runs || request.load_failed) return;
  if (failed) {
    request.load_failed = true;  // its row in flight computes on nothing
    if (!request.load_unsettled) Finish(request, FinishReason::kFailed);  // it was said to be there, and its tokens are with the client
  } else if (!request.loading()) {
    request.first_load_tokens = 0;
    Publish(request, residence);
    if (!adjuncts_.empty()) LoadsEnded(request, residence);
  }
}

// ---- a load that failed ----

void Scheduler::Reload(Request& request) {
  ForgetRunning(request);
  ++totals_.reloads;
  for (const int64_t id : std::exchange(request.load_ops, {})) {
    if (request.load_failed) continue;
    // Not answered yet: which pages are bad is not known, so nobody is given any of them.
    CacheOp& op = ops_.at(id);
    if (auto* load = std::get_if<LoadBackOp>(&op); load != nullptr) {
      for (const HostPin& pin : load->host) host_.Discard(pin);
    } else {
      auto& holds = std::get<AdjunctLoadOp>(op);
      for (const HostPin& pin : holds.host) adjuncts_[holds.place].host.Discard(pin);
    }
  }
  if (request.first_load_tokens > 0) {
    totals_.prefix_hit_tokens -= request.first_load_tokens;
    totals_.host_hit_tokens -= request.host_tokens;
    totals_.storage_hit_tokens -= request.storage_tokens;
    request.cached_tokens -= request.first_load_tokens;
    request.first_load_tokens = request.host_tokens = request.storage_tokens = 0;
    --totals_.hits_cut[static_cast<size_t>(request.hit_cut)];
    request.hit_cut = HitCut::kLoadFailed;
    ++totals_.hits_cut[static_cast<size_t>(request.hit_cut)];
  }
  request.load_failed = request.load_unsettled = false;
  request.computed = 0;
  request.width = 0;
  request.overtaken = 0;
  request.hint = {};
  request.reach = 0;
  request.retracted_since_us = now_us_;
  reloaded_.push_back(request.id);
  if (request.inflight_rows > 0) {
    Apply(request, ReloadInFlight{});
  } else {
    Apply(request, tokenspeed::Reload{});
    waiting_.emplace(request.order, &request);
  }
}

}  // namespace tokenspeed
